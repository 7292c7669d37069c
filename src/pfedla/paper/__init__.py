"""The paper's tables and figures: what it prints, the runs that reproduce it, and the two side by side."""
