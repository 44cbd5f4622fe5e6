"""What the runner computes on a CPU in C: attention from pages and what comes before it, products with packed
weights, gated MLPs, norms, and decoder layers made of these.

Compiled at first use, for the CPU it runs on, by the system's C compiler. Where there is none, torch computes.
"""
