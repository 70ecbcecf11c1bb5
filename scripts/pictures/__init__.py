"""Pictures of README and docs: `scripts/make-pictures`."""
