"""A user's module whose package is not installed."""

import package_of_nobody  # noqa: F401
