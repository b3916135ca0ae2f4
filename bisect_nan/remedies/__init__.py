"""The remedies: for every cause the changes that a user would make, the smallest first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bisect_nan.remedies import data, domain, masking, precision, reductions, stable, updates
from bisect_nan.remedies.proposal import Proposal, Site, Strategy

__all__ = ["BY_CAUSE", "Proposal", "Site", "Strategy", "proposals"]

_DERIVATIVE = (domain.root_of_sum, domain.clamp, domain.safe_divisor, domain.jitter, masking.double_where)
_INFINITIES = (masking.leave_one_score, masking.finite_operands, masking.finite_mask)
_DIVISION = (domain.epsilon, domain.inside_the_root, domain.safe_divisor, masking.double_where)
_WIDER = (precision.island, precision.whole)

BY_CAUSE: dict[str, tuple[Strategy, ...]] = {
    "input_nonfinite": (data.replace_elements, data.skip_samples),
    "parameter_nonfinite": (data.replace_elements,),
    "buffer_nonfinite": (data.replace_elements,),
    "uninitialized_memory": (data.zeros_for_empty_memory,),
    "learning_rate_nonfinite": (updates.finite_hyperparameter,),
    "optimizer_eps_underflow": (updates.larger_eps,),
    "gradient_nonfinite_applied": (updates.skip_update,),
    "learning_rate_explosion": (updates.lower_rate, updates.scale_back),
    "softmax_all_masked": (masking.leave_one_score, masking.finite_mask, masking.finite_operands),
    "fp16_overflow": (precision.saturate, precision.island, precision.whole),
    "grad_overflow_fp16": (precision.lower_scale, precision.island, precision.whole),
    "grad_overflow": (stable.log_of_probability, *_DERIVATIVE, precision.lower_scale, *_WIDER),
    "sqrt_grad_at_zero": _DERIVATIVE,
    "log_grad_at_zero": (stable.log_of_probability, *_DERIVATIVE),
    "pow_grad_at_zero": _DERIVATIVE,
    "trig_grad_at_boundary": _DERIVATIVE,
    "norm_grad_at_zero": _DERIVATIVE,
    "std_grad_at_zero": _DERIVATIVE,
    "division_grad": _DERIVATIVE,
    "degenerate_spectrum_grad": _DERIVATIVE,
    "logsumexp_grad_all_neginf": _INFINITIES,
    "where_masked_gradient": (
        stable.log_of_probability,
        masking.double_where,
        *_DERIVATIVE,
        *_INFINITIES,
        domain.clamp_exponent,
    ),
    "loss_target_invalid": (
        reductions.zero_infinity,
        reductions.leave_out_ruled_out,
        domain.clamp,
        masking.finite_mask,
        masking.finite_operands,
        masking.double_where,
    ),
    "empty_reduction": (reductions.zero_for_empty, domain.safe_divisor),
    "degenerate_dof": (reductions.population_variance,),
    "log_of_zero": (stable.log_of_probability, domain.clamp, domain.jitter),
    "log_of_negative": (domain.clamp, stable.absolute_determinant, domain.jitter),
    "sqrt_of_negative": (domain.clamp, domain.root_of_sum),
    "pow_domain": (domain.clamp, masking.double_where),
    "trig_domain": (domain.clamp,),
    "zero_variance": _DIVISION,
    "zero_over_zero": (updates.some_eps, *_DIVISION),
    "division_by_zero": (updates.some_eps, *_DIVISION),
    "zero_times_inf": _INFINITIES,
    "inf_minus_inf": _INFINITIES,
    "exp_overflow": (stable.subtract_maximum, domain.clamp_exponent, *_WIDER),
    "overflow": (
        precision.saturate,
        domain.clamp_exponent,
        domain.safe_divisor,
        precision.island,
        precision.clamp_operand,
        precision.whole,
    ),
    "singular_matrix": (domain.jitter,),
    "function_pole": (domain.clamp, domain.safe_divisor, masking.double_where),
    "nonfinite_constant": (masking.finite_numbers, masking.finite_mask),
    "unclassified": (masking.finite_numbers, *_DERIVATIVE, *_INFINITIES, *_WIDER),
}
"""By cause: its strategies. Whatever the cause, the samples that carry the fault can be left out."""


def proposals(site: Site) -> Iterator[Proposal]:
    """Yield the changes that fit a culprit, the smallest first.

    A tensor that a strategy cannot read (a sparse layout, a type without comparison) costs that strategy, not the others.
    """
    for strategy in (*BY_CAUSE.get(site.culprit.cause, ()), data.skip_samples):
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            yield from strategy(site)
