"""One head of the pretrained model imitated by students of every width and start."""

from __future__ import annotations

from headwise.reproduce.claim import Trial, Values

METHODS = ("SVD start", "SVD start, fine-tuned", "random start, fine-tuned")
ASIDE = 4  # one window of so many chooses the rate


def imitated(trial: Trial) -> Values:
    """Errors on new text, and what the model's loss rises by, of all students of one head."""
    from headwise.compress.recipes.parts import attention_weights
    from headwise.nn.build import plan_of
    from headwise.reproduce import head_student as student
    from headwise.reproduce import student_fitting, student_starts
    from headwise.reproduce.narrow_heads import head_weights
    from headwise.reproduce.pretrained import documents, loss_from, passages, subject

    p, it = trial.parameters, subject()
    model, text, layer = it.model, documents(p["text"]), p["layer"]
    used = passages(it.words, text.calibrated, (p["windows"], p["length"]), trial.seed)
    scored = passages(it.words, text.scored, (p["scored"], p["length"]), trial.seed)
    heads, attention = plan_of(model).layers[layer], model.attentions()[layer]
    # Head groups in turn, then the next query head of each.
    query, group = divmod(trial.seed, len(heads.heads))
    query %= heads.heads[group].queries
    shown = student.lesson(model, layer, used)
    n = max(1, len(used) // ASIDE)
    lessons = (
        student.Lesson(shown.hidden[n:], shown.turns),
        student.Lesson(shown.hidden[:n], shown.turns),
    )
    new = student.lesson(model, layer, scored)
    begin = student.Start(
        heads.heads[group].model_copy(update={"queries": 1}),
        head_weights(heads, group, query, attention_weights(attention)),
    )
    teacher = student.Imitation(begin, attention, shown.turns)
    exercise = student_fitting.Exercise(p["steps"], p["batch"], tuple(p["rates"]), trial.seed)
    whole_loss, loss_now = loss_from(model, layer, scored)
    with student.exchanged(attention, teacher, None):
        removed = loss_now() - whole_loss
    rows = []
    for width in p["widths"]:
        svd = student_starts.truncated(teacher, lessons[0], width)
        chance = student_starts.random(teacher, width, trial.seed)
        made = (
            (student.Imitation(svd, attention, shown.turns), 0.0),
            student_fitting.fitted(svd, teacher, lessons, exercise),
            student_fitting.fitted(chance, teacher, lessons, exercise),
        )
        for method, (one, rate) in zip(METHODS, made, strict=True):
            with student.exchanged(attention, teacher, one):
                rise = loss_now() - whole_loss
            missed = student.error(one, teacher, new)
            found = {"error": missed, "rise": rise, "rate": rate}
            rows.append({"width": width, "method": method, **found})
    return {
        "loss": whole_loss,
        "removed": removed,
        "group": group,
        "query": query,
        "students": rows,
        "text_sha256": text.sha256,
    }
