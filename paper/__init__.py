"""The paper's tables and the questions around them: `python -m paper TARGET`."""
