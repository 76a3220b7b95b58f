"""Operators that amplify the error of a lossy tensor, or decide by it in backward: one table for eager and graphs.

Names are those of ATen, without overload and underscores at their ends, and the names by which source code calls them.
Eager code finds an operator by its name in the source, or by its autograd node; a graph has the operators themselves.
"""

from __future__ import annotations

from actstore.base.operators import node_of

SIGNS = frozenset({"sgn", "sign", "signbit"})
COMPARISONS = frozenset(
    {
        "le", "lt", "ge", "gt", "eq", "ne", "less_equal", "less", "greater_equal", "greater", "equal", "not_equal",
    }
)  # fmt: skip
# Operators whose result jumps where an argument crosses a bound, or another argument.
CHOICES = frozenset(
    {
        "isclose", "allclose", "logical_not", "logical_and", "logical_or", "logical_xor", "heaviside", "floor", "ceil",
        "round", "trunc", "fix", "frac", "fmod", "remainder", "floor_divide", "argmax", "argmin", "max", "min",
        "median", "nanmedian", "mode", "kthvalue", "sort", "msort", "argsort", "topk", "cummax", "cummin", "bucketize",
        "searchsorted", "nextafter", "copysign", "nonzero", "histc", "unique", "unique2", "unique_dim",
        "unique_consecutive", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
        "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "fractional_max_pool2d", "fractional_max_pool3d", "low_memory_max_pool_with_offsets",
        "low_memory_max_pool2d_with_offsets",
    }
)  # fmt: skip
# Operators whose backward reads the sign of what they save.
DECIDE_BY_SIGN = frozenset(
    {
        "abs", "absolute", "prelu", "prelu_kernel", "leaky_relu", "elu", "selu", "celu", "logsigmoid", "i0e", "i1e",
        "cosine_similarity",
    }
)  # fmt: skip
# Operators whose backward compares what they save with other numbers, or reads all of its bits.
DECIDE_BY_VALUE = frozenset(
    {
        "clamp", "clip", "clamp_min", "clamp_max", "hardshrink", "softshrink", "hardtanh", "threshold", "relu6",
        "hardsigmoid", "hardswish", "rrelu_with_noise", "max", "min", "amax", "amin", "aminmax", "median", "nanmedian",
        "maximum", "minimum", "fmax", "fmin", "scatter_reduce", "index_reduce", "segment_reduce", "pdist",
        "pairwise_distance", "dist", "cdist", "renorm", "norm", "vector_norm", "matrix_norm", "corrcoef", "copysign",
        "nextafter", "remainder", "fmod", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "smooth_l1_loss",
        "huber_loss", "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss",
        # They divide by it, or take its root: the error of a number that is small in its group is large beside it.
        "entr", "special_entr", "xlogy", "special_xlogy", "hypot", "kl_div", "addcdiv", "prod", "cumprod", "vander",
        "atan2", "arctan2",
        # A small error crosses a pole of their slopes, or grows exponentially.
        "acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh", "erfinv", "logit", "psi", "lgamma",
        "gammaln", "mvlgamma", "multigammaln", "binary_cross_entropy", "logsumexp", "logcumsumexp", "logaddexp",
        "logaddexp2", "xlog1py", "lu", "lu_solve", "triangular_solve", "solve_triangular", "cholesky_solve",
    }
)  # fmt: skip
# Operators with a pole at zero, or at the end of their domain, by the position of that argument.
POLES = {
    "div": 1, "reciprocal": 0, "rsqrt": 0, "sqrt": 0, "log": 0, "log2": 0, "log10": 0, "log1p": 0, "pow": 0,
    "digamma": 0, "polygamma": 1,
}  # fmt: skip
# What backward computes again from a saved input of these: the error grows with the exponential.
EXPONENTIALS = frozenset(
    {
        "softmax", "log_softmax", "safe_softmax", "logsumexp", "prepare_softmax_online", "exp", "exp2", "expm1",
    }
)  # fmt: skip
# Operators whose result must be exact: its error is amplified, by exp or by a division of small differences, or it is
# the loss. Measured on a character GPT: norm statistics are 0.14 % of the saved bytes and up to 86 % of the
# gradient error when encoded; log-softmax 1.5 % of the bytes and up to 20,000 %.
EXACT_RESULTS = frozenset(
    {
        "softmax", "log_softmax", "safe_softmax", "logsumexp", "prepare_softmax_online", "nll_loss_forward",
        "nll_loss2d_forward", "linalg_eigh", "linalg_svd", "ctc_loss", "var_mean", "var", "std", "std_mean",
        "rrelu_with_noise", "rrelu_with_noise_functional", "rsqrt", "reciprocal", "linalg_qr", "linalg_lu_factor_ex",
        "linalg_cholesky_ex", "linalg_vector_norm",
    }
)  # fmt: skip
BY_RESULT = frozenset(
    {
        "ReluBackward0", "EluBackward1", "CeluBackward1", "RreluWithNoiseBackward1", "ThresholdBackward1",
    }
)  # fmt: skip
"""Nodes that save their result, and pass a gradient where it is above 0."""
EXACT_PRODUCERS = frozenset(f"{node_of(name)}{number}" for name in EXACT_RESULTS | SIGNS for number in "01") - BY_RESULT
"""Nodes of `EXACT_RESULTS` and of signs."""


def decides_in_backward(operator: str) -> bool:
    """Return whether an operator of a backward graph is the backward of one that decides by its saved tensors."""
    forward = operator.removesuffix("_backward")
    return forward != operator and forward.strip("_") in DECIDE_BY_VALUE
