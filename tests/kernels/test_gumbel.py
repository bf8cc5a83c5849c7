"""Noise that target and drafter share: the same bits everywhere, a Gumbel law down to its tails, and draws from it."""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from support.gumbel_checks import DRAWS, POSITIONS, SEEDS, VOCABULARIES, check_draws, check_noise
from support.numpy_noise import gumbel as numpy_gumbel
from torch import library

from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax, gumbel_argmax_reference, gumbel_reference
from arbordraft.kernels.gumbel.reference import LANES, gumbel_of, logarithm, philox, words_of

WORD = 2**32 - 1
LIKELY = 1e-6  # lowest p-value that passes; seeds are fixed, so results never vary


def arrays(xp, integers):
    """Converts integers to an array of numpy or torch."""
    return np.array(integers, dtype=np.uint64) if xp is np else torch.tensor(integers)


def noise(rows, vocabulary, seed=0):
    """Returns ``[rows, V]`` noise at neighbouring positions, in numpy."""
    return gumbel(torch.full((rows,), seed), torch.arange(rows), vocabulary).numpy()


# The definition


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(library, counter, key, words):
    """The words are those of Random123, the authors' own implementation."""
    xp = {"numpy": np, "torch": torch}[library]
    found = philox(tuple(arrays(xp, [word]) for word in counter), tuple(arrays(xp, [word]) for word in key))
    assert tuple(int(word[0]) for word in found) == words


def test_each_token_has_its_words_of_the_counters():
    """Token ``64 g + 16 w + l`` has word w of counter ``16 g + l``: kind 0 holds the upper word, kind 1 the lower."""
    seed, position, vocabulary = 0x123456789ABCDEF0, 77, 192
    upper, lower = words_of(torch.tensor([seed]), torch.tensor([position]), torch.arange(vocabulary // 4), torch)
    for token in (0, 15, 16, 63, 64, 100, 191):
        group, word, lane = token // 64, token % 64 // LANES, token % LANES
        for half, words in enumerate((upper, lower)):
            counter = [torch.tensor(part) for part in (group * LANES + lane, position, half, 0)]
            key = torch.tensor(seed & WORD), torch.tensor(seed >> 32)
            assert words[0, token] == philox(tuple(counter), key)[word]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_logarithm(library):
    """The error is at most 4 units in the last place, also next to 1, where the logarithm is small."""
    generator = np.random.default_rng(0)
    near = 1 + np.concatenate([generator.uniform(-0.4, 0.5, 500), [-(2.0**-53), 2.0**-52, -(2.0**-20), 2.0**-20]])
    wide = np.exp(generator.uniform(-45, 4, 500))
    x = np.concatenate([near, wide, [2.0**-65, 2.0**-53, 0.5, 0.7071067811865475, 0.7071067811865476, 1, 2, 36.7]])
    found = logarithm(x, np) if library == "numpy" else logarithm(torch.from_numpy(x), torch).numpy()
    exact = [mpmath.log(mpmath.mpf(float(value))) for value in x]
    error = [abs(mpmath.mpf(float(value)) - true) for value, true in zip(found, exact, strict=True)]
    unit = np.spacing(np.abs(np.array([float(true) for true in exact])))
    assert (np.array(error, dtype=float) <= 4 * unit).all()


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        (0, 0, -mpmath.log(-mpmath.log1p(-(mpmath.mpf(2) ** -65)))),
        (0, 1, -mpmath.log(-mpmath.log1p(-mpmath.mpf(3) * mpmath.mpf(2) ** -65))),
        (1 << 31, 0, -mpmath.log(mpmath.log(2))),
        (WORD, WORD, -mpmath.log(53 * mpmath.log(2))),
    ],
    ids=["greatest", "next", "median", "least"],
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_extreme_words(library, upper, lower, expected):
    if library == "numpy":
        found = gumbel_of(np.array([float(upper)]), np.array([float(lower)]), np)
    else:
        found = gumbel_of(torch.tensor([float(upper)]).double(), torch.tensor([float(lower)]).double(), torch)
    assert abs(float(found[0]) - float(expected)) < 1e-14 * max(1.0, abs(float(expected)))


def test_the_noise_equals_its_formula_in_high_precision():
    """Nested logarithms lose little precision, so rare tokens keep their probability."""
    seeds, positions, vocabulary = torch.tensor([3, -5]), torch.tensor([0, 9]), 640
    upper, lower = words_of(seeds, positions, torch.arange(vocabulary // 4), torch)
    with mpmath.workdps(40):
        exact = [
            float(-mpmath.log(-mpmath.log1p(-(mpmath.mpf(high) * 2**32 + low + mpmath.mpf("0.5")) / 2**64)))
            for high, low in zip(upper.flatten().tolist(), lower.flatten().tolist(), strict=True)
        ]
    found = gumbel_reference(seeds, positions, vocabulary).flatten().numpy()
    assert np.abs(found - exact).max() < 1e-14


# The same bits


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_numpy_and_torch_agree(vocabulary):
    found = numpy_gumbel([seed % 2**64 for seed in SEEDS.tolist()], POSITIONS.tolist(), vocabulary)
    assert np.array_equal(found, gumbel_reference(SEEDS, POSITIONS, vocabulary).numpy())
    assert found.shape == (5, vocabulary)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 5000])
def test_the_kernels_noise_is_the_definition(vocabulary):
    check_noise(vocabulary)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DRAWS)
def test_the_kernels_draws_are_the_definition(case, dtype):
    check_draws(case, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_draws_from_large_rows(temperature):
    """One thread or several may read a row."""
    scores, rows = 3 * torch.randn(4, 49_152), torch.arange(4)
    expected = gumbel_argmax_reference(scores, rows, rows, temperature, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(gumbel_argmax(scores, rows, rows, temperature), expected)


@pytest.mark.usefixtures("kernels")
def test_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    for path in ("auto", "reference"):
        with choice.use(path):
            assert gumbel(none, none, 70).shape == (0, 70)
            assert gumbel_argmax(torch.empty(0, 70), none, none).shape == (0,)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gumbel", (SEEDS, POSITIONS, 70)),
        ("gumbel_argmax", (torch.zeros(5, 70).bfloat16(), SEEDS, POSITIONS, 0.7, None)),
        ("gumbel_argmax", (torch.zeros(5, 70), SEEDS, POSITIONS, 0.7, torch.zeros(5))),
    ],
)
@pytest.mark.parametrize("overload", ["default", "portable"])
def test_the_operators_are_registered_properly(name, arguments, overload):
    library.opcheck(getattr(getattr(torch.ops.arbordraft, name), overload), arguments)


# The law


@pytest.mark.parametrize("vocabulary", [1, 65, 4099])
def test_the_law(vocabulary):
    """Tests mean, variance and Kolmogorov-Smirnov statistic of 200,000 numbers, row after row."""
    values = noise(200_000 // vocabulary, vocabulary).flatten()
    error = np.pi / np.sqrt(6 * len(values))
    assert abs(values.mean() - np.euler_gamma) < 5 * error
    assert abs(values.var() - np.pi**2 / 6) < 5 * np.sqrt(4.4 / len(values)) * np.pi**2 / 6
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > LIKELY


BASE = {"seeds": 0x1234, "positions": 1000, "shift": 0}


@pytest.mark.parametrize(
    "other",
    [
        {"seeds": 0x1235},
        {"seeds": 0x1234 + 2**32},
        {"seeds": 0x1234 - 2**63},
        {"seeds": -0x1234},
        {"positions": 1001},
        {"positions": 1000 + 2**31},
        {"seeds": 1000, "positions": 0x1234},
        *({"shift": shift} for shift in (1, 4, 16, 64, 1024)),
        {},  # negative control
    ],
    ids=str,
)
def test_independence(other):
    """A number is independent of those of other seeds, positions and tokens."""
    count = 100_000
    first, second = (
        stats.gumbel_r.cdf(
            gumbel(torch.tensor([at["seeds"]]), torch.tensor([at["positions"]]), count + 1024)[0, at["shift"] :][:count]
        )
        for at in (BASE, BASE | other)
    )
    table, _, _ = np.histogram2d(first, second, bins=16, range=[[0, 1]] * 2)
    assert (stats.chisquare(table.flatten()).pvalue > LIKELY) == bool(other)


def tail(noise):
    """Returns the p-values of two tests of the upper tail ``u = P(G > g)``.

    The first counts, in every range of token ids, the numbers that would draw a token of probability 2**-6 to 2**-17.
    The second tests where the smallest u lie within a step of 2**-24: float32 uniforms are multiples of that step.
    """
    u = -np.expm1(-np.exp(-noise))
    edges = np.concatenate([[0], 2.0 ** np.arange(-17, -5)])
    groups = np.array_split(u, 8, axis=1)
    counts = np.stack([np.histogram(group[group < edges[-1]], edges)[0] for group in groups])
    expected = np.stack([np.diff(edges) * group.size for group in groups])
    within = np.histogram(u[u < 2.0**-10] * 2.0**24 % 1, 16, (0, 1))[0]
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size), stats.chisquare(within).pvalue


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocabulary", [49_152, 262_144])
def test_rare_tokens(vocabulary):
    """In 10**7 numbers, every range of token ids is drawn as often as expected, and the tail has no steps."""
    assert min(tail(noise(-(-(10**7) // vocabulary), vocabulary))) > LIKELY


def test_float32_uniforms_would_be_noticed():
    """Negative control: probabilities of rare tokens would be multiples of 2**-24."""
    uniforms = torch.rand(38, 262_144, generator=torch.Generator().manual_seed(0)).clamp(min=2.0**-24)
    coarse, fine = tail(-(-uniforms.log()).log().double().numpy())
    assert fine < 1e-100
    assert coarse > LIKELY  # counts of 10**7 draws do not detect it


ZEROS = 20  # leading bits that are 0


@pytest.mark.parametrize("bits", [64, 24], ids=["64 bits", "negative control: 24 bits"])
def test_very_rare_tokens(bits):
    """Tests draws too rare to wait for: given numbers with leading zeros, they are a million times as frequent.

    The bits of a word are independent, so these zeros do not change the law of the other bits. A token of probability p
    is drawn if ``E / p < E' / (1 - p)``. Here E is the exponential variable of the token, which is small, and E' that
    of all other tokens together.
    """
    rows = torch.arange(16)
    upper, lower = words_of(rows, rows, torch.arange(4096), torch)
    upper = upper >> ZEROS
    if bits == 24:  # float32 uniforms, at the centres of their steps
        upper, lower = upper >> 8 << 8 | 0x80, lower * 0
    g = gumbel_of(upper.double(), lower.double(), torch).numpy().flatten()
    others = np.random.default_rng(0).gumbel(size=len(g))
    small = -np.log1p(-(2.0**-ZEROS))
    found = [stats.kstest(-np.expm1(-np.exp(-g)) * 2.0**ZEROS, "uniform").pvalue]
    for p in (2.0**-20, 2.0**-24, 2.0**-27):
        drawn = int((g + np.log(p) > others + np.log1p(-p)).sum())
        found.append(stats.binomtest(drawn, len(g), -(2.0**ZEROS) * p * np.expm1(-small / p)).pvalue)
    assert (min(found) > LIKELY) == (bits == 64)
    assert (found[-1] > LIKELY) == (bits == 64)


# Draws


def test_draws_have_the_law_of_the_row():
    """Tests 60,000 draws by chi-square; one token has probability 1/2,000."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.0495, 0.0005], dtype=torch.float64)
    count = 60_000
    tokens = gumbel_argmax(p.log().float().expand(count, 5), torch.full((count,), 5), torch.arange(count))
    assert stats.chisquare(tokens.bincount(minlength=5), p * count).pvalue > LIKELY


def test_the_temperature_divides_scores_and_not_noise():
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    count = 30_000
    tokens = gumbel_argmax(
        p.log().float().expand(count, 3), torch.full((count,), 5), torch.arange(count), temperature=0.5
    )
    cold = p**2 / (p**2).sum()
    assert stats.chisquare(tokens.bincount(minlength=3), cold * count).pvalue > LIKELY


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtypes_without_kernels_are_drawn_by_the_definition(dtype):
    scores, rows = torch.randn(50, 90, dtype=dtype), torch.arange(50)
    expected = (scores.to(torch.promote_types(dtype, torch.float32)) / 0.7).double() + gumbel_reference(rows, rows, 90)
    assert torch.equal(gumbel_argmax(scores, rows, rows, 0.7), expected.argmax(dim=-1))


def test_no_token_below_the_lowest_score_is_drawn():
    scores, rows = torch.randn(300, 70), torch.arange(300)
    lowest = (scores / 0.5).sort(dim=-1).values[:, -3]
    expected = gumbel_argmax(scores.masked_fill(scores / 0.5 < lowest[:, None], -torch.inf), rows, rows, 0.5)
    found = gumbel_argmax(scores, rows, rows, 0.5, lowest)
    assert torch.equal(found, expected)
    assert (found != gumbel_argmax(scores, rows, rows, 0.5)).any()


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_nothing_is_drawn_where_no_score_is_above_minus_infinity(path):
    scores = torch.zeros(3, 100)
    scores[1] = -torch.inf
    with choice.use(path):
        tokens = gumbel_argmax(scores, torch.arange(3), torch.arange(3))
        assert tokens[1] == -1
        assert (tokens[[0, 2]] >= 0).all()
        lowest = torch.tensor([0.0, 0.0, 1.0])
        assert gumbel_argmax(scores, torch.arange(3), torch.arange(3), 1.0, lowest)[1:].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": 1e-40}, "temperature 1e-40 is too low for float32"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"seeds": torch.arange(1)}, r"seeds must be one number for each of the 2 rows, got shape \[1\]"),
        ({"positions": torch.arange(3)}, r"positions must be one number for each of the 2 rows, got shape \[3\]"),
        ({"lowest": torch.zeros(2, 1)}, r"lowest must be one number for each of the 2 rows, got shape \[2, 1\]"),
    ],
    ids=["cold", "next to cold", "negative", "nan", "seeds", "positions", "lowest"],
)
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_refused_draws(path, change, match):
    arguments = {"scores": torch.zeros(2, 9), "seeds": torch.arange(2), "positions": torch.arange(2)}
    with choice.use(path), pytest.raises(ValueError, match=match):
        gumbel_argmax(**arguments | change)
