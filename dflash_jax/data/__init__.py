"""Data: prompts, chats, rendering, regeneration by the target, batches. Knows no model."""
