"""Speed, as ratios within one run: the machines this runs on are shared and noisy."""
