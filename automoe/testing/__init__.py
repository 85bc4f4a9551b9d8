"""What tests of distributed code need; nothing here is imported by training."""
