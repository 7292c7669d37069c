"""Speed and memory, as ratios within one run: the machines this runs on are shared and noisy.

`python -m benchmarks [NAME...]` runs them; docs/benchmarks.md says what each measures and what it found.
"""
