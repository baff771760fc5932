"""Training: a plan and a text become a model (`train`), a cut model learns back (`recover`).

Enters a plan, or a cut model and the one it was cut from, and a text. Leaves a model folder, with
metrics and checkpoints while it is being made; a killed run ends in the same weights. One loop
(`loop`) serves both, on one process or many.
"""
