"""The ways to move pages."""
