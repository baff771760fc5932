"""Every level a task states is checked against a predictor that reaches it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from headwise.papers.tasks.discrete import (
    ContextInduction,
    InductionHead,
    PreviousToken,
    RandomLabels,
    SequenceClassification,
)
from headwise.papers.tasks.ngram import ACTIVATIONS, NGram
from headwise.papers.tasks.task import SyntheticTask, TaskBatch, TaskError
from tests import lanes

# Monte Carlo tolerances, at least 4 standard errors: a share of 16001 or more independent trials
# has a standard error of at most 0.004; a mean square of 30011 or more (the heaviest tails are
# those of a sum of squares, relative deviation 2) one of at most 0.012.
NEAR = 0.02
NEAR_SQUARE = 0.05
MANY = 16_001


def one_hot(answers: torch.Tensor, classes: int) -> torch.Tensor:
    """Logits of a predictor that gives these answers."""
    return torch.nn.functional.one_hot(answers, classes).float()


def score(task: SyntheticTask, answers: torch.Tensor, batch: TaskBatch) -> float:
    return task.metric(one_hot(answers, task.n_outputs), batch)


EXAMPLES: tuple[SyntheticTask, ...] = (
    NGram(11, 3, (0.5, -2.0)),
    NGram.random(3, 5, 13, activation="relu"),
    NGram.copying(2, 3, 7),
    PreviousToken(7, 5, back=2),
    InductionHead(11, 13, 7),
    ContextInduction(17, 5, 11),
    RandomLabels(5, 3, MANY, 7),
    SequenceClassification(11, 7, 3, noise=0.1),
)


@pytest.mark.parametrize("task", EXAMPLES, ids=lambda t: type(t).__name__)
def test_samples_are_fixed_by_their_seed_and_fit_the_stated_sizes(task):
    a, b, c = task.sample(19, 5), task.sample(19, 5), task.sample(19, 6)
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.targets, b.targets)
    assert not torch.equal(a.inputs, c.inputs)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(task.sample(19, generator).inputs, a.inputs)
    assert not torch.equal(task.sample(19, generator).inputs, a.inputs)
    assert a.inputs.shape[:2] == a.scored.shape == (19, task.length)
    assert a.scored.any()
    if task.continuous:
        assert a.inputs.shape[2] == task.n_inputs
    else:
        assert int(a.inputs.min()) >= 0
        assert int(a.inputs.max()) < task.n_inputs
    outputs = torch.zeros(19, task.length, task.n_outputs)
    assert math.isfinite(float(task.loss(outputs, a)))
    assert hash(task) == hash(replace(task))
    assert a.to("cpu").scored.equal(a.scored)


@pytest.mark.parametrize("task", EXAMPLES, ids=lambda t: type(t).__name__)
def test_chance_is_what_a_constant_answer_gets(task):
    batch = task.sample(MANY, 3)
    if task.regression:
        mean = task.sigma.mean * task.matrices().sum(dim=(0, 2)).float()
        constant = mean.expand(MANY, task.length, -1)
        assert task.metric(constant, batch) == pytest.approx(task.chance, rel=NEAR_SQUARE)
        shifted = task.metric(constant + 1, batch)
        assert shifted == pytest.approx(task.chance + 1, rel=NEAR_SQUARE)
    else:
        flat = torch.zeros(MANY, task.length, task.n_outputs)
        assert float(task.loss(flat, batch)) == pytest.approx(task.chance_loss, rel=1e-5)
        answers = torch.zeros(MANY, task.length, dtype=torch.int64)
        assert score(task, answers, batch) == pytest.approx(task.chance, abs=NEAR)
    assert task.optimum != task.chance


def test_loss_and_metric_count_scored_positions_only():
    task = PreviousToken(3, 2)
    batch = TaskBatch(
        torch.tensor([[0, 1, 1]]),
        torch.tensor([[1, 0, 1]]),
        torch.tensor([[False, True, True]]),
    )
    logits = torch.tensor([[[9.0, 0.0], [0.0, math.log(3)], [0.0, math.log(3)]]])
    # The scored answers are 1 and 1 with probability 3/4: one right, one wrong.
    assert task.metric(logits, batch) == 0.5
    assert float(task.loss(logits, batch)) == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)
    gram = NGram(2, 1, (1.0, 1.0))
    vectors = TaskBatch(
        torch.zeros(1, 2, 1), torch.tensor([[[50.0], [3.0]]]), torch.tensor([[False, True]])
    )
    assert gram.metric(torch.ones(1, 2, 1, requires_grad=True), vectors) == 4.0


# --- n-gram ---------------------------------------------------------------------------------


def test_ngram_targets_by_hand():
    rho_0, rho_1 = ((1.0, 2.0),), ((0.0, -1.0),)
    task = NGram(3, 2, (rho_0, rho_1), activation="square")
    batch = task.sample(7, 1)
    x = batch.inputs
    wanted = x[:, 1, 0] ** 2 + 2 * x[:, 1, 1] ** 2 - x[:, 0, 1] ** 2
    torch.testing.assert_close(batch.targets[:, 1, 0], wanted)
    assert batch.scored.tolist() == [[False, True, True]] * 7
    assert (task.n_inputs, task.n_outputs) == (2, 1)


def test_ngram_levels_by_hand():
    task = NGram(5, 3, (2, 1.0, -0.5))
    assert task.chance == task.zero_error == 5.25
    assert [task.truncated_error(m) for m in range(5)] == [5.25, 1.25, 0.25, 0, 0]
    assert task.affine_error() == 0
    # Of lag 0 two of three equal directions pass, of lag 1 one, of lag 2 none.
    assert task.rank_error((2, 1)) == pytest.approx(4 / 3 + 2 / 3 + 0.25)
    assert task.rank_error((3, 3, 3)) == 0
    # Numbers span one direction: a single pattern of any sign is enough.
    assert task.pattern_error(0) == pytest.approx(5.25)
    assert task.pattern_error(1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_moments_against_quadrature(activation):
    sigma = ACTIVATIONS[activation]
    z = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    bent = sigma.function(z)
    for values, moment in ((bent, sigma.mean), (bent**2, sigma.second), (z * bent, sigma.slope)):
        assert float(torch.trapezoid(values * density, z)) == pytest.approx(moment, abs=1e-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_linear_predictor_beats_the_affine_error_and_least_squares_reaches_it(activation):
    task = NGram.random(3, 2, 7, activation=activation, decay=0.7, seed=2)
    batch = task.sample(30_011, 4)
    x, y = batch.inputs.double(), batch.targets.double()
    assert task.metric(torch.zeros_like(batch.targets), batch) == pytest.approx(
        task.zero_error, rel=NEAR_SQUARE
    )
    for lags in (1, 3):
        past = torch.cat([x[:, 5 - i] for i in range(lags)], dim=1)
        design = torch.cat([past, torch.ones(len(past), 1)], dim=1)
        fit = torch.linalg.lstsq(design, y[:, 5]).solution
        left = float((design @ fit - y[:, 5]).square().mean())
        assert left == pytest.approx(task.affine_error(lags), rel=NEAR_SQUARE, abs=1e-12)
    # Beside it, the predictor that sees one lag and knows σ:
    seen = task.sigma.function(batch.inputs) @ task.matrices()[0].float().T
    rest = task.sigma.mean * task.matrices()[1:].sum(dim=(0, 2)).float()
    assert task.metric(seen + rest, batch) == pytest.approx(
        task.truncated_error(1), rel=NEAR_SQUARE
    )
    if activation != "linear":
        assert task.affine_error() > 0.05 * task.chance


def test_random_weights_make_a_target_of_unit_variance_that_needs_one_pattern_per_lag():
    task = NGram.random(4, 8, 13)
    assert task.chance == pytest.approx(1)
    assert task.energies == pytest.approx((0.25,) * 4)
    assert task.rank_error((4,) * 4) == pytest.approx(0.5)
    floors = [task.pattern_error(h) for h in range(5)]
    assert floors[4] == pytest.approx(0, abs=1e-12)
    assert all(a > b + 0.1 for a, b in itertools.pairwise(floors))
    means = torch.stack([NGram.random(1, 2, 1, seed=s).matrices()[0] for s in range(997)]).mean(0)
    assert means.abs().max() < 0.1  # entries of spread 0.7: 4 standard errors
    shrinking = NGram.random(3, 5, 13, decay=0.5)
    assert shrinking.energies == pytest.approx((16 / 21, 4 / 21, 1 / 21))


def test_pattern_error_is_a_floor_that_the_best_patterns_reach():
    task = NGram.random(3, 5, 7, seed=1)
    rho = task.matrices()
    u, s, v = torch.linalg.svd(rho.flatten(1), full_matrices=False)
    two = ((u[:, :2] * s[:2]) @ v[:2]).reshape(rho.shape)
    best = float((two - rho).square().sum()) / 5
    assert best == pytest.approx(task.pattern_error(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        attention = torch.rand(3, 2, generator=generator, dtype=torch.float64)
        values = torch.linalg.lstsq(attention, rho.flatten(1)).solution
        left = float((attention @ values - rho.flatten(1)).square().sum()) / 5
        assert left >= task.pattern_error(2) - 1e-12


@pytest.mark.parametrize("activation", ["linear", "abs"])
def test_bottleneck_error_is_what_the_best_plane_leaves(activation):
    generator = torch.Generator().manual_seed(3)
    rho = torch.randn(2, 5, 3, generator=generator).tolist()
    task = NGram(7, 3, tuple(tuple(map(tuple, m)) for m in rho), activation)
    assert task.bottleneck_error(0) == pytest.approx(task.chance)
    assert task.bottleneck_error(5) == 0
    y = task.sample(30_011, 5).targets[:, 4].double()
    y = y - y.mean(dim=0)
    left = float((torch.linalg.svdvals(y)[2:] ** 2).sum() / y.numel())
    assert left == pytest.approx(task.bottleneck_error(2), rel=NEAR_SQUARE)
    assert NGram.random(3, 5, 7).bottleneck_error(2) == pytest.approx(3 / 5)


def test_copying_puts_the_last_tokens_side_by_side():
    task = NGram.copying(3, 2, 5)
    batch = task.sample(7)
    x = batch.inputs
    torch.testing.assert_close(batch.targets[:, 4], torch.cat([x[:, 4], x[:, 3], x[:, 2]], dim=1))
    assert task.chance == pytest.approx(1)
    assert task.truncated_error(2) == pytest.approx(1 / 3)


# --- induction ------------------------------------------------------------------------------


def looked_up(tokens: torch.Tensor) -> torch.Tensor:
    """What followed the latest earlier occurrence of each token; 0 where there is none."""
    answers = torch.zeros_like(tokens)
    for row, line in enumerate(tokens.tolist()):
        for t, token in enumerate(line):
            earlier = [s for s in range(t) if line[s] == token]
            if earlier:
                answers[row, t] = line[earlier[-1] + 1]
    return answers


def test_looking_up_the_token_solves_induction_exactly_and_shuffling_breaks_it():
    task = InductionHead(11, 13, 7)
    batch = task.sample(211, 1)
    assert score(task, looked_up(batch.inputs), batch) == task.optimum == 1
    mixed = batch.inputs.clone()
    mixed[:, :7] = mixed[:, torch.tensor([3, 5, 1, 6, 0, 4, 2])]
    assert score(task, looked_up(mixed), batch) < 0.5


def oldest(tokens: torch.Tensor) -> torch.Tensor:
    """Of the tokens seen so far, at each position, the one not seen for longest."""
    answers = torch.zeros_like(tokens)
    for row, line in enumerate(tokens.tolist()):
        for t in range(len(line)):
            last = {token: s for s, token in enumerate(line[: t + 1])}
            answers[row, t] = min(last, key=lambda token: last[token])
    return answers


def test_the_shortcut_of_a_prefix_repeated_in_order_does_not_work_here():
    task = InductionHead(11, 13, 7)
    batch = task.sample(1009, 4)
    assert score(task, oldest(batch.inputs), batch) < 1.5 * task.order_blind
    looped = torch.cat([batch.inputs[:, :7], batch.inputs[:, :5]], dim=1)
    in_order = TaskBatch(looped[:, :-1], looped[:, 1:], batch.scored)
    assert score(task, oldest(in_order.inputs), in_order) == 1


def test_repeated_tokens_are_scored_each_once_in_an_order_that_tells_nothing():
    batch = InductionHead(11, 13, 7).sample(MANY, 2)
    for line, scored in zip(batch.inputs[:101].tolist(), batch.scored.tolist(), strict=False):
        assert scored == [token in line[:t] for t, token in enumerate(line)]
        assert len(set(line[:7])) == 7
        assert len(set(line[7:])) == 4
        assert line[6] not in line[7:]
    # Where in the prefix a repeated token stood: six places, all equally likely, each time anew.
    places = (batch.inputs[:, 7:, None] == batch.inputs[:, None, :7]).long().argmax(dim=-1)
    for column in places.T:
        shares = column.bincount(minlength=6) / MANY
        assert shares.tolist() == pytest.approx([1 / 6] * 6, abs=NEAR)


def test_no_fixed_distance_and_no_order_blind_guess_beats_the_stated_level():
    task = InductionHead(11, 13, 7)
    batch = task.sample(MANY, 3)
    for back in range(11):
        copied = batch.inputs.roll(back, dims=1)
        copied[:, :back] = batch.inputs[:, :back]  # nothing there to copy: a wrong answer
        # Position 7 + k sees a token that can be the answer unless it is the current or the first.
        able = sum(7 + k - back >= 1 for k in range(4)) if back else 0
        assert score(task, copied, batch) == pytest.approx(able / 4 / 6, abs=NEAR)
    among = torch.full((MANY, 11, 13), -1e9)
    among.scatter_(2, batch.inputs[:, None, :].expand(-1, 11, -1), 0)
    among.scatter_(2, batch.inputs[:, :, None], -1e9)
    assert float(task.loss(among, batch)) == pytest.approx(task.order_blind_loss, abs=1e-5)
    guess = (among + torch.rand(among.shape, generator=torch.Generator().manual_seed(1))).argmax(-1)
    assert score(task, guess, batch) == pytest.approx(task.order_blind, abs=NEAR)
    assert task.order_blind == 1 / 6


def test_previous_token_is_solved_by_copying_and_missed_by_the_wrong_lag():
    task = PreviousToken(11, 7, back=2)
    batch = task.sample(2003, 1)
    assert score(task, batch.inputs.roll(2, dims=1), batch) == 1
    for wrong in (0, 1, 3):
        assert score(task, batch.inputs.roll(wrong, dims=1), batch) == pytest.approx(
            task.chance, abs=NEAR
        )
    assert batch.scored[0].tolist() == [False] * 2 + [True] * 9


# --- memorization ---------------------------------------------------------------------------


def test_memorization_draws_rows_of_one_fixed_set():
    task = RandomLabels(5, 3, 31, 7, seed=2)
    whole, some = task.everything(), task.sample(13, 9)
    rows = (some.inputs[:, None] == whole.inputs[None]).all(dim=(2, 3))
    assert rows.sum(dim=1).tolist() == [1] * 13
    assert rows.sum(dim=0).max() == 1
    found = rows.long().argmax(dim=1)
    assert torch.equal(some.targets, whole.targets[found])
    assert whole.scored.sum(dim=1).tolist() == [1] * 31
    assert bool(whole.scored[:, -1].all())
    whole.inputs.zero_()
    assert torch.equal(task.sample(13, 9).inputs, some.inputs)


def test_labels_are_independent_of_the_tokens_and_of_other_labels():
    task = RandomLabels(1, 1, 20_011, 5)
    labels = task.everything().targets[:, -1]
    other = task.relabelled(1).everything()
    assert torch.equal(other.inputs, task.everything().inputs)
    assert score(task, labels[:, None], other) == pytest.approx(task.chance, abs=NEAR)
    assert score(task, labels[:, None], task.everything()) == task.optimum
    # No threshold on the token tells anything about the label.
    high = task.everything().inputs[:, 0, 0] > 0
    for label in range(5):
        assert float((labels[high] == label).double().mean()) == pytest.approx(0.2, abs=NEAR)
    assert task.constant_accuracy == float((labels == labels.mode().values).double().mean())
    assert task.constant_accuracy >= task.chance


def test_a_shared_context_differs_in_the_query_only():
    inputs = RandomLabels(5, 3, 31, 7, shared=True).everything().inputs
    assert torch.equal(inputs[:, :-1], inputs[:1, :-1].expand(31, -1, -1))
    assert len(inputs[:, -1].unique(dim=0)) == 31


# --- classification -------------------------------------------------------------------------


def bits_of(batch: TaskBatch) -> list[list[int]]:
    return [[t for t in line if t < 2] for line in batch.inputs.tolist()]


RULES = {
    "first": lambda bits: bits[0],
    "majority": lambda bits: int(2 * sum(bits) > len(bits)),
    "parity": lambda bits: sum(bits) % 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("length", [11, 47])
@pytest.mark.parametrize("rule", lanes.slow_but(("parity",), RULES))
def test_the_rule_reaches_the_bayes_accuracy_and_loss_at_every_length(rule, length):
    task = SequenceClassification(length, 7, 3, rule, noise=0.1)
    batch = task.sample(MANY, 2)
    bits = bits_of(batch)
    assert {len(b) for b in bits} == {3}
    clean = torch.tensor([RULES[rule](b) for b in bits])
    answers = clean[:, None].expand(-1, length)
    assert score(task, answers, batch) == pytest.approx(task.optimum, abs=NEAR)
    knowing = one_hot(answers, 2) * math.log(9)  # probabilities 0.9 and 0.1
    assert float(task.loss(knowing, batch)) == pytest.approx(task.optimum_loss, abs=2 * NEAR)
    quiet = replace(task, noise=0.0)
    assert score(quiet, answers, quiet.sample(MANY, 2)) == quiet.optimum == 1


def test_counting_alone_reaches_the_order_blind_level():
    task = SequenceClassification(11, 7, 5, "first", noise=0.1)
    batch = task.sample(MANY, 5)
    majority = torch.tensor([RULES["majority"](b) for b in bits_of(batch)])
    assert score(task, majority[:, None].expand(-1, 11), batch) == pytest.approx(
        task.order_blind, abs=NEAR
    )
    # Two bits: equal half of the time (right), different half of the time (a coin).
    assert SequenceClassification(11, 7, 2).order_blind == 0.75
    assert SequenceClassification(11, 7, 3, "parity", 0.1).order_blind == 0.9


def test_whoever_misses_one_bit_of_a_parity_is_at_chance():
    task = SequenceClassification(11, 7, 5, "parity")
    batch = task.sample(MANY, 6)
    missing = torch.tensor([sum(b[1:]) % 2 for b in bits_of(batch)])
    assert score(task, missing[:, None].expand(-1, 11), batch) == pytest.approx(0.5, abs=NEAR)


# --- induction on several tokens --------------------------------------------------------------


def followed(line: list[int], window: list[int], prefix: int, lags: range) -> list[int]:
    """What followed each window of a prefix that agrees at these lags, among those there once."""
    back = len(window)
    seen = [line[i : i + back] for i in range(prefix - back)]
    return [
        line[i + back]
        for i, other in enumerate(seen)
        if seen.count(other) == 1
        and all(other[back - 1 - lag] == window[back - 1 - lag] for lag in lags)
    ]


def test_a_window_that_occurs_once_has_one_answer_and_two_of_its_tokens_are_not_enough():
    task = ContextInduction(22, 5, 13)
    batch = task.sample(307, 1)
    assert batch.scored.nonzero()[:3, 1].tolist() == [15, 18, 21]
    for lags, votes_of in ((range(3), []), (range(2), []), (range(1, 3), []), (range(1), [])):
        for line, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            for at in (13, 16, 19):
                answers = followed(line, line[at : at + 3], 13, lags)
                if lags == range(3):
                    assert answers == [targets[at + 2]]
                votes_of.append(max(map(answers.count, answers)) / len(answers))
        by_hand = sum(votes_of) / len(votes_of)
        assert task.partial_accuracy(batch, lags) == pytest.approx(by_hand, abs=1e-6)
    assert task.partial_accuracy(batch, range(3)) == 1
    assert task.partial_accuracy(batch, range(2)) < 0.95


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NGram(5, 3, ()), "lags of at least 1, got 0"),
        (lambda: NGram(2, 3, (1.0, 1.0, 1.0)), "length"),
        (lambda: NGram(5, 3, (1.0,), "rleu"), "Did you mean 'relu'"),
        (lambda: NGram(5, 2, (((1.0, 2.0),), 1.0)), "same shape"),
        (lambda: NGram(5, 3, (((1.0, 2.0),),)), "3 columns"),
        (lambda: NGram(5, 3, (1.0,), "relu").pattern_error(1), "linear task"),
        (lambda: NGram(5, 3, (1.0,), "abs").rank_error((1,)), "linear task"),
        (lambda: PreviousToken(3, 5, back=3), "length"),
        (lambda: InductionHead(11, 5, 7), "vocabulary"),
        (lambda: InductionHead(7, 13, 7), "at least 8, got 7"),
        (lambda: InductionHead(14, 13, 7), "at most 13"),
        (lambda: ContextInduction(19, 5, 11), "add 1"),
        (lambda: ContextInduction(11, 5, 11), "length"),
        (lambda: ContextInduction(17, 5, 3), "prefix"),
        (lambda: RandomLabels(5, 3, 7, 2).sample(8), "7 examples there are, got 8"),
        (lambda: RandomLabels(5, 3, 7, 1), "labels of at least 2"),
        (lambda: SequenceClassification(11, 7, 4, "majority"), "odd"),
        (lambda: SequenceClassification(11, 7, 3, "last"), "first"),
        (lambda: SequenceClassification(11, 7, 3, noise=0.5), "below 0.5"),
        (lambda: SequenceClassification(2, 7, 3), "length"),
    ],
)
def test_impossible_tasks_are_refused_with_the_reason(make, said):
    with pytest.raises(TaskError, match=said):
        make()


class TestClassificationIsScoredByItsRule:
    """A sample of 1,024 noisy labels had 3.5% flips instead of 5%: all were below the optimum."""

    TASK = SequenceClassification(length=64, vocab_size=16, marks=5, rule="first", noise=0.05)

    def outputs(self, batch, confidence):
        """What a network that knows the rule answers, with some confidence."""
        right = torch.nn.functional.one_hot(batch.targets, 2).double()
        return (confidence * right + (1 - confidence) * (1 - right)).log()

    def test_the_best_predictor_reaches_the_optimum_and_nothing_falls_below(self):
        batch = self.TASK.scored_sample(1024, 1 << 30)
        best = self.TASK.expected_loss(self.outputs(batch, 0.95), batch)
        assert float(best) == pytest.approx(self.TASK.optimum_loss, abs=1e-12)
        for confidence in (0.9, 0.93, 0.97, 0.999):
            loss = float(self.TASK.expected_loss(self.outputs(batch, confidence), batch))
            assert loss > self.TASK.optimum_loss
        assert self.TASK.expected_metric(self.outputs(batch, 0.95), batch) == pytest.approx(0.95)

    def test_a_sample_of_noisy_labels_is_off_its_optimum(self):
        """The control: what the scores were taken on before."""
        clean = self.TASK.scored_sample(1024, 1 << 30)
        noisy = self.TASK.sample(1024, 1 << 30)
        assert torch.equal(clean.inputs, noisy.inputs)
        flips = (clean.targets != noisy.targets)[clean.scored].double().mean()
        assert float(flips) < 0.04
        loss = float(self.TASK.loss(self.outputs(clean, 0.95), noisy))
        assert loss < self.TASK.optimum_loss - 0.02

    def test_other_tasks_are_scored_as_they_are(self):
        task = NGram.random(2, 3, 7, seed=1)
        assert torch.equal(task.scored_sample(5, 3).targets, task.sample(5, 3).targets)
