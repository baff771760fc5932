"""Pages, charts, the model card and the plan explorer.

Input: folders that headwise wrote (a cut model, a profile, a training run, a comparison), read as
typed records. Output: self-contained files. The templates escape everything that comes from those
folders.
"""
