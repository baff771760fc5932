"""Export of a model for other engines.

Input: an opened source. Output: a folder (transformers, ONNX) or a file (GGUF), with the parity
measured in the engine itself. `headwise.planning.targets` says which engine runs which plan.
"""
