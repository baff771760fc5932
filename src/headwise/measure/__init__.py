"""Measurements of models.

Input: loaded models and texts (or images). Output: likelihoods, comparisons of two models, speeds,
sizes and the record of a verification. Nothing is trained or written here.
"""
