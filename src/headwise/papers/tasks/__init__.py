"""What claims are measured on: synthetic tasks, small networks, trainings, one pretrained model.

A trained network's score means something only beside two numbers: what the perfect predictor gets
(`optimum`) and what a predictor gets that never looks at its input (`chance`). Between them lie the
scores of *blind* predictors: one that sees too few lags, one that is only linear, one that ignores
the order of tokens. A network that beats such a score has provably learned the thing.

    task                    input        target                        optimum      chance
    NGram                   white noise  Σ_i ρ_i·σ(x_{t−i})            0            Var y_t
    PreviousToken           tokens       the token `back` places back  1            1/V
    InductionHead           tokens       what followed this token      1            1/V
    RandomLabels            white noise  a random label                1            1/K
    SequenceClassification  tokens       a noisy bit of the sequence   1 − noise    1/2

Nothing is imported here, because claims are listed and drawn without torch.
"""
