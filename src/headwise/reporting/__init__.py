"""What a person looks at: pages, charts, the model card and the plan explorer.

Folders that headwise wrote enter (a cut model, a profile, a training run, a comparison) and are
read as typed records; self-contained files leave. Whatever comes from those folders is escaped by
the templates.
"""
