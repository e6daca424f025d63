"""The embedded default: generated puzzles with known faults, and a small model that knows them."""
