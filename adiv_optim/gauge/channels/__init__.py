"""The channels of a model: tracing it, and a rule for each operation."""
