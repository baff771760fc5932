"""A headwise model written as other engines load it.

An opened source enters; a folder (transformers, ONNX) or a file (GGUF) leaves, with the parity
that was measured in the engine itself. Which plans fit which engine is `headwise.planning.targets`.
"""
