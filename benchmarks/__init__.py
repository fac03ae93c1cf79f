"""Optimizer-side against structural corrections: data, models, methods, trainers, speed and report."""
