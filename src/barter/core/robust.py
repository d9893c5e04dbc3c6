"""Robust aggregation of clients' answers: a minority cannot move the result far.

The run's configuration names one defence (`robust`) and the assumed share of adversarial clients
(`robust_share`). `Experiment` activates it with `using` for the rounds of a run. The ops that
average or ensemble answers then call it; with "none" they compute what their method defines.

Aggregates come in four kinds, and "auto" is the recommended defence of each (`RECOMMENDED`):

- "states": weights of networks, of heads, or of submodels.
- "logits": predictions of several teachers.
- "prototypes": vectors by class.
- "sets": anything that is not averaged, such as condensed images. Here a defence selects clients:
  an answer too far from the aggregate of all answers is left out.

Defences that look at single entries are the coordinate-wise median and the trimmed mean (Yin et
al., ICML 2018). Those that look at a client's answer as one vector are norm clipping (to the median
norm), Krum and multi-Krum (Blanchard et al., NeurIPS 2017) and the geometric median (Pillutla et
al., IEEE TSP 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "RECOMMENDED",
    "Aggregate",
    "AggregationRule",
    "CosineBasis",
    "Defence",
    "active",
    "aggregate",
    "class_agreement",
    "clip_factors",
    "distances",
    "krum_scores",
    "median",
    "pairwise",
    "select",
    "trimmed_mean",
    "using",
    "weiszfeld",
    "without_outliers",
]

Aggregate: TypeAlias = Literal["states", "logits", "prototypes", "sets"]
AggregationRule: TypeAlias = Literal[
    "none",
    "auto",
    "median",
    "trimmed-mean",
    "clip",
    "krum",
    "multi-krum",
    "geometric-median",
    "cosine",
]
# Defences recommended for each kind of aggregate; docs/adversaries.md has the measurements.
RECOMMENDED: dict[Aggregate, AggregationRule] = {
    "states": "cosine",
    "logits": "cosine",
    "prototypes": "cosine",
    "sets": "cosine",
}
# What the cosine rule compares; see `Defence.agreeing`.
CosineBasis: TypeAlias = Literal["norm", "update", "content", "prediction"]
LEAST_UPPER = (
    0.3  # Least upper quartile of similarities at which answers can be told apart by them.
)
COMPARABLE = 0.2  # Least cosine with the most similar class at which features can be compared.
CONTRADICTED = 1 / 3  # A client is left out if its class agreement is below this.
FAR = 3.0  # A set is left out if its distance exceeds this multiple of the median distance.
ITERATIONS = 20  # Weiszfeld steps of the geometric median.
TINY = 1e-12


@dataclass(frozen=True)
class Defence:
    """A rule of aggregation, and the share of clients assumed to be adversarial.

    >>> import torch
    >>> from barter.core.robust import Defence
    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [1000.0]])
    >>> Defence("median").combine([rows], "states")[0].tolist()
    [2.5]
    """

    rule: AggregationRule = "none"
    share: float = 0.3

    def rule_for(self, kind: Aggregate) -> AggregationRule:
        """Return the rule for a kind of aggregate; "auto" is resolved."""
        return RECOMMENDED[kind] if self.rule == "auto" else self.rule

    def defends(self, kind: Aggregate) -> bool:
        """Return whether a rule other than "none" computes aggregates of this kind."""
        return self.rule_for(kind) != "none"

    def keeps_weights(self, kind: Aggregate) -> bool:
        """Return whether a caller of `combine` should give it the method's weights.

        Only with the rule "cosine", a mean over selected clients. With the other robust rules it
        should give equal weights, since the number of its images is a client's claim. False for
        "none" too: callers then compute the method's own mean, see `defends`.
        """
        return self.rule_for(kind) == "cosine"

    def combine(
        self,
        blocks: Sequence[Tensor],
        kind: Aggregate,
        weights: Sequence[Tensor] | None = None,
        decides: Sequence[bool] | None = None,
        since: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Aggregate the clients' answers by the defence's rule.

        The rules "none", "median" and "trimmed-mean" treat each entry on its own. The others compare
        whole answers, over all blocks that decide, and average the clipped or the selected ones.

        Args:
            blocks: The parts of an answer, such as the tensors of a state; each has one row per
                client (clients, ...).
            kind: What the answers are: states, logits, prototypes or sets. The rule "auto" depends
                on it, and so does what "cosine" compares.
            weights: For each block the clients' weights, of a shape that broadcasts to the block's;
                0 where a client has no value. None gives all clients the same weight.
            decides: For each block, whether it counts in norms and distances; None for all.
            since: For each block, the value that all clients started from, such as the weights that
                the server sent. The rules "clip" and "cosine" (except for logits) take norms and
                directions of the difference from it. With None, "clip" takes the difference from
                the median of all clients, and "cosine" compares only the norms of states.

        Returns:
            One tensor per block, without the clients' axis. Entries that no client has are 0, or
            the value of `since` with the rule "clip".
        """
        rule = self.rule_for(kind)
        shares = _broadcast(blocks, weights)
        pairs = list(zip(blocks, shares, strict=True))
        if rule == "none":
            return [_mean(rows, share) for rows, share in pairs]
        if rule == "median":
            return [median(rows, share) for rows, share in pairs]
        if rule == "trimmed-mean":
            return [trimmed_mean(rows, share, self.share) for rows, share in pairs]
        centres = [median(rows, share) for rows, share in pairs]
        starts = centres if since is None else list(since)
        scale = torch.ones(len(blocks[0]), dtype=torch.double, device=blocks[0].device)
        votes = scale
        # Blocks that decide, as the rules compare them.
        chosen = [i for i in range(len(blocks)) if decides is None or decides[i]]
        compared = [blocks[i] for i in chosen]
        held = [shares[i] for i in chosen]
        from_starts = [starts[i] for i in chosen]
        if rule == "clip":
            centres = starts
            scale = clip_factors(compared, held, from_starts)
        elif rule == "cosine":
            if kind == "logits":
                votes = self.agreeing_predictions(compared, held).double()
            else:
                by: CosineBasis = "content"
                if kind == "states":
                    by = "norm" if since is None else "update"
                votes = self.agreeing(compared, held, from_starts, by).double()
        else:
            votes = self._votes(rule, compared, held, [centres[i] for i in chosen])
        result = []
        for (rows, share), centre in zip(pairs, centres, strict=True):
            moved = centre + _along(scale, rows) * (rows - centre)
            voted = _along(votes, rows) * share
            total = voted.sum(0)
            mean = (voted * moved).sum(0) / total.clamp_min(TINY)
            # Entries that only clients without a vote have keep the median of these clients.
            result.append(torch.where(total > 0, mean, centre))
        return result

    def _votes(
        self,
        rule: AggregationRule,
        blocks: Sequence[Tensor],
        weights: Sequence[Tensor],
        centres: Sequence[Tensor],
    ) -> Tensor:
        """Return a weight per client (clients,) by Krum, multi-Krum or geometric median.

        By Krum the client of the lowest score has weight 1 and all others 0; by multi-Krum the n -
        f lowest have 1, with f of `adversary_count`. Ties go to the client that comes first. The
        geometric median gives the weights of `weiszfeld`. The caller multiplies by `weights`.

        Args:
            rule: "krum", "multi-krum" or "geometric-median".
            blocks: The blocks that decide, as in `combine`.
            weights: For each block the clients' weights, of the block's shape. Krum uses only
                whether they are positive.
            centres: For each block, where the geometric median starts; Krum ignores them.
        """
        if rule == "geometric-median":
            return weiszfeld(blocks, weights, centres)
        n = len(blocks[0])
        scores = krum_scores(pairwise(blocks, weights), self.adversary_count(n))
        chosen = 1 if rule == "krum" else n - self.adversary_count(n)
        votes = torch.zeros_like(scores)
        # A stable order breaks ties by the client's position.
        votes[scores.sort(dim=0, stable=True).indices[:chosen]] = 1.0
        return votes

    def adversary_count(self, n: int) -> int:
        """Return the assumed number of adversarial clients among n.

        It is share * n, rounded up, and at most (n - 1) // 2: fewer than half of them.
        """
        return min(math.ceil(self.share * n - 1e-9), (n - 1) // 2)

    def agreeing(
        self,
        blocks: Sequence[Tensor],
        weights: Sequence[Tensor],
        starts: Sequence[Tensor],
        by: CosineBasis,
        agreement: Tensor | None = None,
    ) -> Tensor:
        """Return for each client (clients,) whether its answer counts by rule "cosine".

        It does if it points where those of the others do. A client is left out if its norm exceeds
        three times the median norm, or if its cosine similarity (`similarities`) is low in
        comparison with U, the upper quartile over clients. At most the assumed number of
        adversarial clients is left out: norms first, then the lowest similarities. FLAME (Nguyen et
        al., USENIX Security 2022) selects by cosines and bounds norms too.

        Args:
            blocks: As in `combine`.
            weights: For each block the clients' weights, of the block's shape.
            starts: For each block, the value from which differences are taken.
            by: "norm" compares norms alone. "update": updates of honest clients can be orthogonal,
                so only those below -U / 2 (and -0.05) are left out. "content": features of honest
                clients resemble each other, so those below U / 3 are left out, unless nobody's do
                (U < 0.3). "prediction": predictions (clients, ..., images, classes) are compared
                without each client's mean over images, which shows what classes it has. Those below
                U (1 + U) / 3 are left out: the more alike predictions are, the more alike they
                must be. Again, nobody is if U < 0.3.
            agreement: For each client its `class_agreement`, which decides instead of the
                similarity unless it is NaN; those below 1/3 are left out. None for none.
        """
        norms = distances(blocks, weights, starts)
        too_long = norms > FAR * median(norms)
        directions = blocks
        if by == "prediction":
            directions = [_without_image_mean(rows) for rows in blocks]
        scores = similarities(directions, weights, starts) - 10 * too_long.double()
        upper = scores.sort().values[(3 * len(scores)) // 4]
        if by == "norm":
            apart = torch.zeros_like(too_long)
        elif by == "update":
            apart = scores < (-upper / 2).clamp_max(-0.05)
        elif by == "content":
            apart = (scores < upper / 3) & (upper >= LEAST_UPPER)
        else:
            apart = (scores < upper * (1 + upper) / 3) & (upper >= LEAST_UPPER)
        if agreement is not None:
            known = ~agreement.isnan()
            apart = torch.where(known, agreement < CONTRADICTED, apart)
            scores = torch.where(known, agreement - 10 * too_long.double(), scores)
        rank = scores.sort(dim=0, stable=True).indices.argsort()
        return ~((too_long | apart) & (rank < self.adversary_count(len(norms))))

    def agreeing_predictions(
        self, blocks: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return for each client (clients,) whether its predictions agree with others'.

        They do by `agreeing` on "prediction", after the mean over classes was subtracted.

        Args:
            blocks: Logits or probabilities (clients, ..., images, classes).
            weights: As in `combine`.
        """
        # A softmax ignores what all classes share.
        compared = [rows - rows.mean(-1, keepdim=True) for rows in blocks]
        starts = [torch.zeros_like(rows[0]) for rows in compared]
        return self.agreeing(compared, _broadcast(blocks, weights), starts, "prediction")

    def keep(
        self,
        blocks: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
        kind: Aggregate = "sets",
    ) -> Tensor:
        """Return for each client (clients,) whether its set counts, by sets' summaries.

        Krum and multi-Krum leave out the `adversary_count` clients with the highest scores, and
        "cosine" those that `agreeing` by "content" finds. The other robust rules leave out clients
        whose distance from the aggregate exceeds three times the median distance. The rule "none"
        leaves out nobody, nor does any rule among fewer than three clients.

        Args:
            blocks: Summaries (clients, ...). One block (clients, classes, features) is taken as the
                mean features of each class, and "cosine" compares clients by `class_agreement`.
            weights: As in `combine`.
            kind: The kind of aggregate whose rule applies.
        """
        n = len(blocks[0])
        rule = self.rule_for(kind)
        if rule == "none" or n < 3:
            return torch.ones(n, dtype=torch.bool, device=blocks[0].device)
        shares = _broadcast(blocks, weights)
        if rule == "cosine":
            # Without a common start: from the median of all classes and clients.
            flat = [rows.flatten(0, -2) for rows in blocks]
            held = [share.flatten(0, -2) for share in shares]
            starts = [median(rows, share) for rows, share in zip(flat, held, strict=True)]
            agreement = None
            if len(blocks) == 1 and blocks[0].ndim == 3:
                agreement = class_agreement(blocks[0], shares[0][..., 0] > 0)
            return self.agreeing(blocks, shares, starts, "content", agreement)
        if rule in ("krum", "multi-krum"):
            scores = krum_scores(pairwise(blocks, shares), self.adversary_count(n))
            left_out = scores.sort(dim=0, descending=True, stable=True).indices[
                : self.adversary_count(n)
            ]
            mask = torch.ones(n, dtype=torch.bool, device=blocks[0].device)
            mask[left_out] = False
            return mask
        centres = self.combine(blocks, kind, shares)
        far = distances(blocks, shares, centres)
        return far <= FAR * median(far).clamp_min(TINY)


def _broadcast(blocks: Sequence[Tensor], weights: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the weights in double precision, of the blocks' shapes; ones for None."""
    if weights is None:
        return [torch.ones(rows.shape, dtype=torch.double, device=rows.device) for rows in blocks]
    return [share.double().expand(rows.shape) for share, rows in zip(weights, blocks, strict=True)]


def _along(values: Tensor, rows: Tensor) -> Tensor:
    """Return one value per client, shaped (clients, 1, ...) to multiply rows."""
    return values.view(-1, *[1] * (rows.ndim - 1))


def _mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of each entry over clients; 0 where all weights are 0."""
    return (weights * rows).sum(0) / weights.sum(0).clamp_min(TINY)


def _ordered(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort each entry over clients; return values and the mass up to and before each.

    Masses are shares of an entry's total weight. Values without weight come first, so that they
    take part in nothing.
    """
    finite = torch.where(weights > 0, rows, torch.full_like(rows, -torch.inf))
    values, order = finite.sort(dim=0, stable=True)
    sorted_weights = weights.gather(0, order)
    total = sorted_weights.sum(0).clamp_min(TINY)
    upto = sorted_weights.cumsum(0) / total
    before = upto - sorted_weights / total
    return torch.where(sorted_weights > 0, values, torch.zeros_like(values)), upto, before


def median(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return each entry's (weighted) median over clients (Yin et al., ICML 2018).

    Half of the weight lies on either side. Of several values with this property it is the mean, as
    of the two middle values of an even number of rows. Entries without any weight are 0.

    Args:
        rows: One row per client (clients, ...).
        weights: The clients' weights, of the same shape; None for equal weights.
    """
    if weights is None:
        weights = torch.ones(rows.shape, dtype=torch.double, device=rows.device)
    values, upto, before = _ordered(rows, weights)
    middle = ((upto >= 0.5 - 1e-9) & (before <= 0.5 + 1e-9) & (upto > before)).to(values)
    return (values * middle).sum(0) / middle.sum(0).clamp_min(TINY)


def trimmed_mean(rows: Tensor, weights: Tensor | None, share: float) -> Tensor:
    """Return each entry's mean without the lowest and highest share of its weight.

    The trimmed mean of Yin et al., ICML 2018.

    Args:
        rows: One row per client (clients, ...).
        weights: The clients' weights, of the same shape; None for equal weights. A value at the
            limit counts with the part of its weight that lies inside.
        share: The share of an entry's weight that is cut off on either side. A share of a half or
            more is the median.
    """
    if weights is None:
        weights = torch.ones(rows.shape, dtype=torch.double, device=rows.device)
    if share >= 0.5:
        return median(rows, weights)
    values, upto, before = _ordered(rows, weights)
    inside = upto.clamp(share, 1 - share) - before.clamp(share, 1 - share)
    return (values * inside).sum(0) / inside.sum(0).clamp_min(TINY)


def distances(
    blocks: Sequence[Tensor], weights: Sequence[Tensor], centres: Sequence[Tensor]
) -> Tensor:
    """Return each client's distance from a centre.

    It is the root of the mean squared difference of the entries that the client has (those with a
    positive weight, however large), so that clients with submodels of different sizes can be
    compared. A client without entries has distance 0.

    Args:
        blocks: As in `Defence.combine`.
        weights: For each block the clients' weights, of the block's shape.
        centres: For each block the centre, without the clients' axis.
    """
    squares = torch.zeros(len(blocks[0]), dtype=torch.double, device=blocks[0].device)
    entries = torch.zeros_like(squares)
    for rows, share, centre in zip(blocks, weights, centres, strict=True):
        held = (share > 0).double()
        squares = squares + ((rows - centre).double().square() * held).flatten(1).sum(1)
        entries = entries + held.flatten(1).sum(1)
    return (squares / entries.clamp_min(1)).sqrt()


def pairwise(blocks: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the squared distance of every two clients (clients, clients).

    It is the mean over the entries that both have (positive weights); infinite for a client and
    itself. Two clients without a common entry get the median of all other distances.

    Args:
        blocks: As in `Defence.combine`.
        weights: For each block the clients' weights, of the block's shape.
    """
    n = len(blocks[0])
    squares = torch.zeros(n, n, dtype=torch.double, device=blocks[0].device)
    entries = torch.zeros_like(squares)
    for rows, share in zip(blocks, weights, strict=True):
        held = (share > 0).double().flatten(1)
        values = rows.double().flatten(1) * held
        # Client by client: n rows at a time bound the memory.
        squares = squares + torch.stack(
            [((values[k] - values).square() * held[k] * held).sum(1) for k in range(n)]
        )
        entries = entries + held @ held.T
    mean = squares / entries.clamp_min(1)
    alone = torch.eye(n, dtype=torch.bool, device=mean.device)
    known = (entries > 0) & ~alone
    usual = median(mean.flatten(), known.flatten().double())
    mean = torch.where(entries > 0, mean, usual)
    return mean.masked_fill(alone, torch.inf)


def similarities(
    blocks: Sequence[Tensor], weights: Sequence[Tensor], starts: Sequence[Tensor]
) -> Tensor:
    """Return each client's median cosine similarity with the other clients.

    Cosines are those of the differences from `starts`, over the entries that both clients have
    (positive weights). Pairs without a common entry, or with a zero difference, do not count; a
    client without a counting pair gets 0.

    Args:
        blocks: As in `Defence.combine`.
        weights: For each block the clients' weights, of the block's shape.
        starts: For each block the value from which differences are taken, without the clients'
            axis.
    """
    n = len(blocks[0])
    dots = torch.zeros(n, n, dtype=torch.double, device=blocks[0].device)
    squares = torch.zeros_like(dots)
    for rows, share, start in zip(blocks, weights, starts, strict=True):
        held = (share > 0).double().flatten(1)
        values = (rows - start).double().flatten(1) * held
        dots = dots + values @ values.T
        squares = squares + values.square() @ held.T
    cosines = dots / (squares * squares.T).sqrt().clamp_min(TINY)
    others = (squares * squares.T > 0).double() * (1 - torch.eye(n).to(dots))
    return median(cosines, others)


def _without_image_mean(rows: Tensor) -> Tensor:
    """Return predictions (..., images, classes) less their mean over images.

    The mean of fewer images than classes says more about the images than about the client; then
    nothing is subtracted.
    """
    images, classes = rows.shape[-2:]
    return rows if images < classes else rows - rows.mean(-2, keepdim=True)


def class_agreement(vectors: Tensor, held: Tensor) -> Tensor:
    """Return how far clients agree which class is which, from their class vectors.

    Client k is compared with every other client j, in the classes that both have; each one's mean
    vector over these classes is subtracted first. For a pair, d is the mean over the common classes
    of the cosine of k's and j's vectors of the class. m is the mean of the largest absolute cosine
    of k's vector of the class with j's vector of any common class, so m >= |d|. Clients with wrong
    labels have similar vectors in other classes: a small d and a large m. Networks of different
    architectures have unrelated features: both are small, and nothing follows.

    So a pair counts only if it has at least three common classes and
    m >= max(0.2, 2 sqrt(2 ln(classes) / features)), twice what unrelated vectors have; here
    `classes` is the size of the axis, at least 2. The agreement of k is the sum of d over its
    counting pairs divided by the sum of m.

    Args:
        vectors: A finite vector for each client and class (clients, classes, features); those of
            classes that a client does not have make no difference.
        held: Whether the client has the class (clients, classes), bool.

    Returns:
        The agreement of each client (clients,), in double precision, from -1 to 1: 1 if everybody
        agrees, NaN if no pair of the client counts.
    """
    vectors = vectors.double()
    _, classes, features = vectors.shape
    unrelated = math.sqrt(2 * math.log(max(classes, 2)) / features)
    least = max(COMPARABLE, 2 * unrelated)
    result = []
    for k in range(len(vectors)):
        common = (held & held[k]).double()
        count = common.sum(1)
        sizes = count.clamp_min(1)[:, None]
        own = _unit_rows(vectors[k] - (common @ vectors[k] / sizes)[:, None]) * common[..., None]
        means = (common[..., None] * vectors).sum(1) / sizes
        others = _unit_rows(vectors - means[:, None]) * common[..., None]
        cosines = own @ others.mT
        same = cosines.diagonal(dim1=1, dim2=2).sum(1) / sizes[:, 0]
        best = cosines.abs().amax(2).sum(1) / sizes[:, 0]
        counts = (best >= least) & (count >= 3)
        counts[k] = False
        result.append(same[counts].sum() / best[counts].sum())
    return torch.stack(result)


def _unit_rows(rows: Tensor) -> Tensor:
    """Return rows scaled to length 1; rows of zeros stay zero."""
    lengths: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / lengths.clamp_min(TINY)


def krum_scores(squared: Tensor, adversaries: int) -> Tensor:
    """Return each client's Krum score, the sum of its smallest squared distances.

    Args:
        squared: Squared distances of every two clients, infinite for a client and itself.
        adversaries: f, the assumed number of adversarial clients. n - f - 2 distances to
            others count, at least one and at most n - 1.

    Returns:
        One score per client, lower for better ones; 0 for a single client.
    """
    n = len(squared)
    neighbours = min(max(n - adversaries - 2, 1), n - 1)
    if neighbours < 1:
        return squared.new_zeros(n)
    return squared.sort(1).values[:, :neighbours].sum(1)


def clip_factors(
    blocks: Sequence[Tensor], weights: Sequence[Tensor], centres: Sequence[Tensor]
) -> Tensor:
    """Return the factor that scales down each client's difference from the centre.

    Differences are clipped to the median of all clients' `distances` from the centre: the factor is
    median / own distance, at most 1. The arguments are those of `distances`.
    """
    norms = distances(blocks, weights, centres)
    return (median(norms) / norms.clamp_min(TINY)).clamp_max(1.0)


def weiszfeld(
    blocks: Sequence[Tensor], weights: Sequence[Tensor], start: Sequence[Tensor]
) -> Tensor:
    """Return the clients' weights in the geometric median, by Weiszfeld's algorithm.

    It makes 20 steps. In each, a client's weight is the inverse of its distance from the centre,
    where distances below a millionth of the median count as that; the next centre is the mean by
    these weights and `weights` together.

    Args:
        blocks: As in `Defence.combine`.
        weights: For each block the clients' weights, of the block's shape.
        start: For each block the centre of the first step.

    Returns:
        One weight per client; their sum is 1.
    """
    centres = list(start)
    votes = torch.ones(len(blocks[0]), dtype=torch.double, device=blocks[0].device)
    for _ in range(ITERATIONS):
        far = distances(blocks, weights, centres)
        votes = 1 / far.clamp_min(TINY).maximum(1e-6 * median(far))
        votes = votes / votes.sum()
        centres = []
        for rows, share in zip(blocks, weights, strict=True):
            voted = _along(votes, rows) * share
            centres.append((voted * rows).sum(0) / voted.sum(0).clamp_min(TINY))
    return votes


_active = Defence()


def active() -> Defence:
    """Return the defence of the current run; outside of `using` it is rule "none"."""
    return _active


@contextmanager
def using(defence: Defence) -> Iterator[None]:
    """Make a defence the process's active one in the block, then restore the former."""
    global _active
    before = _active
    _active = defence
    try:
        yield
    finally:
        _active = before


def aggregate(rows: Tensor, kind: Aggregate, weights: Tensor | None = None) -> Tensor:
    """Aggregate rows (clients, ...) by the run's defence; see `Defence.combine`.

    The result has the dtype of the rows. Rule "none" gives their mean by `weights`; weights of None
    are equal.
    """
    shares = None if weights is None else [weights]
    return _active.combine([rows], kind, shares)[0].to(rows.dtype)


def without_outliers(values: Tensor, kind: Aggregate) -> Tensor:
    """Replace non-negative values (clients,) above three times their median by 0.

    A run whose defence does not apply to this kind of aggregate keeps all values. Gradients flow to
    the values that stay, not to those replaced.
    """
    if not _active.defends(kind):
        return values
    usual = median(values.detach().double())
    return torch.where(values <= FAR * usual, values, torch.zeros_like(values))


def select(
    blocks: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    kind: Aggregate = "sets",
) -> Tensor:
    """Return for each client (clients,) whether its set counts by the run's defence.

    The arguments are those of `Defence.keep`.
    """
    return _active.keep(blocks, weights, kind)
