"""A user's module that raises when it is imported."""

raise RuntimeError("not today")
