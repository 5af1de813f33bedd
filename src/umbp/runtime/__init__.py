"""Ways to keep objects behind one contract (`base`), and the choice among them by mode (`factory`)."""
