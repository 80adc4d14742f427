"""Scripts that measure and check; run them as modules."""
