"""Runs kernels before they are used: self-tests against `reference`, and what undoing a proposal costs."""
