"""Time limits of sandboxes that a slow machine does not reach."""

from patience import raised_limits  # noqa: F401  (a fixture)
