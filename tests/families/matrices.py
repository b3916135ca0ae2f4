"""Linear algebra, complex numbers and Fourier transforms."""

from __future__ import annotations

import torch

from families import case, t

case("inv singular raises->inv_ex", "singular_matrix", lambda x: torch.linalg.inv_ex(x)[0], torch.zeros(2, 2))
case("inv_ex rank1", "singular_matrix", lambda x: torch.linalg.inv_ex(x)[0], torch.ones(2, 2))
case("solve_ex", "singular_matrix", lambda x: torch.linalg.solve_ex(x, torch.ones(2, 1))[0], torch.ones(2, 2))
case(
    "solve_triangular",
    "singular_matrix",
    lambda x: torch.linalg.solve_triangular(x.tril(), torch.ones(2, 1), upper=False),
    t([1.0, 0.0], [1.0, 0.0]),
)
case("cholesky_ex", "clean", lambda x: torch.linalg.cholesky_ex(x)[0], t([1.0, 2.0], [2.0, 1.0]))
case("cholesky grad", "singular_matrix", lambda x: torch.linalg.cholesky_ex(x)[0], t([0.0, 0.0], [0.0, 1.0]))
case("cholesky grad semidef", "singular_matrix", lambda x: torch.linalg.cholesky_ex(x)[0], t([1.0, 1.0], [1.0, 1.0]))
case("eigh eq", "degenerate_spectrum_grad", lambda x: torch.linalg.eigh(x)[1][0], torch.eye(3))
case("eigh val only", "clean", torch.linalg.eigvalsh, torch.eye(3))
case("svd eq", "degenerate_spectrum_grad", lambda x: torch.linalg.svd(x)[0][0], torch.eye(3))
case(
    "svd zero",
    "degenerate_spectrum_grad",
    lambda x: torch.linalg.svd(x)[0][0],
    t([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
)
case("svdvals", "clean", torch.linalg.svdvals, torch.eye(3))
case("eig eq", "degenerate_spectrum_grad", lambda x: torch.linalg.eig(x)[1][0].abs(), torch.eye(2))
case("eig defective", "degenerate_spectrum_grad", lambda x: torch.linalg.eig(x)[1][0].abs(), t([1.0, 1.0], [0.0, 1.0]))
case("eigvals defective", "clean", lambda x: torch.linalg.eigvals(x).abs(), t([1.0, 1.0], [0.0, 1.0]))
case("qr rank", "singular_matrix", lambda x: torch.linalg.qr(x)[0], torch.ones(3, 2))
case("qr zero", "singular_matrix", lambda x: torch.linalg.qr(x)[0], torch.zeros(3, 2))
case("lstsq rank", "clean", lambda x: torch.linalg.lstsq(x, torch.ones(3, 1))[0], torch.ones(3, 2))
case("pinv rank", "clean", torch.linalg.pinv, torch.ones(3, 2))
case("logdet 0", "log_of_zero", torch.logdet, torch.zeros(2, 2))
case("logdet neg", "log_of_negative", torch.logdet, t([0.0, 1.0], [1.0, 0.0]))
case("slogdet 0", "log_of_zero", lambda x: torch.linalg.slogdet(x)[1], torch.ones(2, 2))
case("det sing", "clean", torch.linalg.det, torch.ones(2, 2))
case("log det", "log_of_zero", lambda x: torch.linalg.det(x).log(), torch.ones(2, 2))
case("det ovf", "overflow", torch.linalg.det, torch.eye(3) * 1e20)
case("matrix_exp ovf", "overflow", torch.linalg.matrix_exp, torch.eye(2) * 200)
case("matrix_power ovf", "overflow", lambda x: torch.linalg.matrix_power(x, 4), torch.eye(2) * 1e20)
case("cond", "division_by_zero", torch.linalg.cond, torch.ones(2, 2))
case("cholesky_solve", "singular_matrix", lambda x: torch.cholesky_solve(torch.ones(2, 1), x), torch.zeros(2, 2))
case(
    "lu_solve",
    "singular_matrix",
    lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(x)[:2], torch.ones(2, 1)),
    torch.ones(2, 2),
)
case("complex angle", "clean", lambda x: x.angle(), torch.zeros(2, dtype=torch.complex64))
case("complex log 0", "log_of_zero", lambda x: x.log(), torch.zeros(2, dtype=torch.complex64))
case("complex sqrt grad", "sqrt_grad_at_zero", lambda x: x.sqrt(), torch.zeros(2, dtype=torch.complex64))
case("complex pow grad", "pow_grad_at_zero", lambda x: x**0.5, torch.zeros(2, dtype=torch.complex64))
case("complex recip", "division_by_zero", lambda x: x.reciprocal(), torch.zeros(2, dtype=torch.complex64))
case("fft ovf", "overflow", lambda x: torch.fft.fft(x).abs(), torch.full((4,), 3e38))
case("rfft ovf", "overflow", lambda x: torch.fft.rfft(x).abs(), torch.full((4,), 3e38))
case("complex mul ovf", "overflow", lambda x: (x * x).abs(), torch.full((2,), 1e30 + 0j, dtype=torch.complex64))
case("complex exp ovf", "exp_overflow", lambda x: x.exp().abs(), torch.full((2,), 100 + 0j, dtype=torch.complex64))
case("complex abs ovf", "overflow", lambda x: x.abs(), torch.full((2,), 3e38 + 3e38j, dtype=torch.complex64))
case(
    "stft mag grad",
    "clean",
    lambda x: torch.stft(x, 4, return_complex=True, window=torch.ones(4)).abs(),
    torch.zeros(16),
)
case(
    "stft log mag",
    "log_of_zero",
    lambda x: torch.stft(x, 4, return_complex=True, window=torch.ones(4)).abs().log(),
    torch.zeros(16),
)
case(
    "sqrt re2+im2",
    "sqrt_grad_at_zero",
    lambda x: torch.view_as_real(torch.fft.rfft(x)).square().sum(-1).sqrt(),
    torch.zeros(8),
)
