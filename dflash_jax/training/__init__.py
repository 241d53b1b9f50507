"""Training: anchors, loss, the step, the trainer."""
