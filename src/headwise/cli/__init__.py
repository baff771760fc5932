"""The command line, one thin file per verb.

The only package that prints, exits or reads the environment. Nothing heavy is imported before a
command needs it.
"""
