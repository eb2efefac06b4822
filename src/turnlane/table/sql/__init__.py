"""What the databases do differently."""
