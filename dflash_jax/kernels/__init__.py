"""The packed block attention of drafter training: one public op, several backends."""
