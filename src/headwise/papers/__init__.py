"""The papers' claims, measured: a client of the library that nothing else imports.

``harness/`` runs experiments and judges them, ``tasks/`` holds the synthetic tasks and small models
they are made of, ``claims/<paper>/`` the claims themselves, each beside what only it needs.
"""
