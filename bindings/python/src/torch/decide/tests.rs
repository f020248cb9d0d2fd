//! Tests of the rule of `decide.rs`, without Python and torch.

#![allow(missing_docs, dead_code, reason = "the bindings use all of it")]

#[path = "../decide.rs"]
mod decide;

use std::convert::Infallible;

use decide::*;
use rapt::{DType, Device};

fn tensor(sizes: &[usize]) -> Tensor<usize> {
    Tensor {
        device: Device::Cpu,
        dtype: Ok(DType::F32),
        sizes: sizes.to_vec(),
        inner_stride: 1,
        requires_grad: false,
        obstacle: None,
    }
}

fn request(q: &[usize], k: &[usize], v: &[usize]) -> Request<usize> {
    let (q, k, v) = (tensor(q), tensor(k), tensor(v));
    Request { q, k, v, mask: None, dropout_p: 0.0, is_causal: false, scale: None, enable_gqa: false }
}

fn plain() -> Request<usize> {
    request(&[2, 4, 6, 8], &[2, 4, 5, 8], &[2, 4, 5, 8])
}

fn answer(request: &Request<usize>, modes: Modes) -> Verdict {
    let Ok(verdict) = decide(request, modes, Stock::NEWEST, || Ok::<_, Infallible>(Some(Kernel::Cudnn)));
    verdict
}

#[track_caller]
fn check(request: &Request<usize>, expected: &Verdict) {
    assert_eq!(answer(request, Modes::ORDINARY), *expected, "{request:?}");
}

fn invalid(what: Invalid) -> Verdict {
    Verdict::Fallback(Reason::Invalid(what))
}

#[test]
fn shapes_that_pytorch_takes_are_served() {
    for (q, k, v) in [
        (&[2, 4, 6, 8][..], &[2, 4, 5, 8][..], &[2, 4, 5, 8][..]),
        (&[6, 8], &[5, 8], &[5, 3]),
        (&[2, 4, 6, 8], &[4, 5, 8], &[5, 8]),
        (&[3, 1, 6, 8], &[1, 4, 5, 8], &[3, 1, 5, 8]),
        (&[2, 3, 4, 6, 8], &[1, 1, 4, 5, 8], &[1, 1, 1, 5, 8]),
    ] {
        assert!(matches!(answer(&request(q, k, v), Modes::ORDINARY), Verdict::Serve(_)), "{q:?} {k:?} {v:?}");
    }
}

#[test]
fn shapes_that_pytorch_does_not_take_are_not() {
    check(&request(&[4, 6, 8], &[2, 6, 8], &[2, 6, 8]), &invalid(Invalid::Broadcast { heads: true }));
    check(&request(&[2, 4, 6, 8], &[3, 4, 6, 8], &[3, 4, 6, 8]), &invalid(Invalid::Broadcast { heads: false }));
    check(&request(&[2, 4, 6, 8], &[2, 4, 5, 7], &[2, 4, 5, 8]), &invalid(Invalid::HeadDim));
    check(&request(&[8], &[5, 8], &[5, 8]), &invalid(Invalid::Rank("q")));
    check(&request(&[2, 4, 6, 8], &[2, 4, 5, 8], &[2, 4, 4, 8]), &Verdict::Refuse(Refusal::KvLen));
    let deep = [1, 1, 1, 1, 1, 1, 1, 6, 8];
    check(&request(&deep, &deep, &deep), &Verdict::Fallback(Reason::TooManyDimensions));
}

#[test]
fn groups_are_served_where_they_are_asked_for_and_divide() {
    let gqa = |q: &[usize], k: &[usize], v: &[usize]| Request { enable_gqa: true, ..request(q, k, v) };
    check(&gqa(&[2, 8, 6, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]), &Verdict::Serve(Order::Query));
    check(&gqa(&[2, 8, 6, 8], &[2, 4, 5, 8], &[2, 2, 5, 8]), &Verdict::Serve(Order::RowMajor));
    check(&gqa(&[2, 8, 6, 8], &[2, 3, 5, 8], &[2, 3, 5, 8]), &invalid(Invalid::Groups));
    check(&gqa(&[6, 8], &[5, 8], &[5, 8]), &invalid(Invalid::Rank("q")));
}

#[test]
fn masks_are_those_that_pytorch_takes() {
    let masked = |sizes: &[usize], dtype| {
        let mask = Some(Tensor { dtype: Ok(dtype), ..tensor(sizes) });
        Request { mask, ..plain() }
    };
    for sizes in [&[6, 5][..], &[1, 1], &[4, 6, 5], &[2, 1, 1, 5]] {
        assert!(matches!(answer(&masked(sizes, DType::Bool), Modes::ORDINARY), Verdict::Serve(_)), "{sizes:?}");
    }
    for sizes in [&[5][..], &[3, 5], &[1, 2, 4, 6, 5], &[6, 6]] {
        check(&masked(sizes, DType::Bool), &invalid(Invalid::MaskShape));
    }
    for dtype in [DType::F16, DType::F64, DType::I64] {
        check(&masked(&[6, 5], dtype), &invalid(Invalid::MaskDtype));
    }
    check(&Request { is_causal: true, ..masked(&[6, 5], DType::Bool) }, &invalid(Invalid::MaskAndCausal));
}

#[test]
fn an_empty_request_is_served_where_its_shapes_fit_q() {
    check(&request(&[2, 4, 6, 8], &[2, 4, 0, 8], &[2, 4, 0, 8]), &Verdict::Serve(Order::RowMajor));
    check(&request(&[2, 4, 0, 8], &[1, 4, 5, 8], &[1, 4, 5, 8]), &Verdict::Serve(Order::RowMajor));
    let empty = Verdict::Fallback(Reason::EmptyInput);
    check(&request(&[1, 4, 6, 8], &[2, 4, 0, 8], &[2, 4, 0, 8]), &empty);
    check(&request(&[2, 4, 0, 8], &[3, 4, 5, 7], &[3, 4, 5, 8]), &empty);
    check(&request(&[2, 4, 6, 0], &[2, 4, 5, 0], &[2, 4, 5, 8]), &empty);
    let older = Stock { shortcut: false, ..Stock::NEWEST };
    let zero = request(&[2, 4, 6, 0], &[2, 4, 5, 0], &[2, 4, 5, 8]);
    let Ok(verdict) = decide(&zero, Modes::ORDINARY, older, || Ok::<_, Infallible>(None));
    assert_eq!(verdict, Verdict::Fallback(Reason::ZeroHeadDim));
}

#[test]
fn what_is_in_force_decides_before_shapes() {
    let mut asks = plain();
    asks.k.requires_grad = true;
    check(&asks, &Verdict::Serve(Order::Query));
    let grad = Modes { grad: true, ..Modes::ORDINARY };
    assert_eq!(answer(&asks, grad), Verdict::Fallback(Reason::RequiresGrad("k")));
    let forward_ad = Modes { forward_ad: true, ..Modes::ORDINARY };
    assert_eq!(answer(&plain(), forward_ad), Verdict::Fallback(Reason::ForwardAd));
    let only_math = Modes { allowed: Allowed { fused: false, math: true }, ..Modes::ORDINARY };
    assert_eq!(answer(&plain(), only_math), Verdict::Fallback(Reason::OnlyMath));
    let no_math = Modes { allowed: Allowed { fused: true, math: false }, ..Modes::ORDINARY };
    let wide = request(&[2, 4, 6, 8], &[2, 4, 5, 8], &[2, 4, 5, 3]);
    assert_eq!(answer(&plain(), no_math), Verdict::Serve(Order::Query));
    assert_eq!(answer(&wide, no_math), Verdict::Fallback(Reason::KernelNotAllowed));
    check(&Request { dropout_p: 0.5, ..plain() }, &Verdict::Fallback(Reason::Dropout));
    check(&Request { scale: Some(f64::NAN), ..plain() }, &Verdict::Fallback(Reason::ScaleNotFinite));
}

#[test]
fn dtypes_and_devices_are_those_of_q() {
    let mut other = plain();
    other.v.dtype = Ok(DType::F64);
    check(&other, &invalid(Invalid::Dtype("v")));
    let mut integers = plain();
    for tensor in [&mut integers.q, &mut integers.k, &mut integers.v] {
        tensor.dtype = Ok(DType::I32);
    }
    assert_eq!(answer(&integers, Modes::ORDINARY), Verdict::Fallback(Reason::Dtype("int32".into())));
    let mut apart = plain();
    apart.k.device = Device::Cuda(0);
    check(&apart, &invalid(Invalid::Device("k")));
    let mut strange = plain();
    strange.q.obstacle = Some(Reason::Layout("sparse_coo".into()));
    assert_eq!(Reason::Layout("sparse_coo".into()).label(), "layout sparse_coo");
    check(&strange, &Verdict::Fallback(Reason::Layout("sparse_coo".into())));
}

#[test]
fn the_order_of_an_answer_is_that_of_the_kernel_that_pytorch_takes() {
    let half = |heads: usize, head_dim_v: usize| {
        let mut request = request(&[2, 4, 6, 64], &[2, heads, 6, 64], &[2, heads, 6, head_dim_v]);
        for tensor in [&mut request.q, &mut request.k, &mut request.v] {
            (tensor.dtype, tensor.device) = (Ok(DType::BF16), Device::Cuda(0));
        }
        request
    };
    let traced = Modes { traced: true, ..Modes::ORDINARY };
    assert_eq!(answer(&half(4, 64), Modes::ORDINARY), Verdict::Serve(Order::Query));
    assert_eq!(answer(&half(4, 64), traced), Verdict::Serve(Order::Query));
    assert_eq!(answer(&half(4, 128), traced), Verdict::Serve(Order::Bshd));
    assert_eq!(answer(&half(1, 64), traced), Verdict::Serve(Order::RowMajor));
    assert_eq!(answer(&Request { enable_gqa: true, ..half(2, 64) }, traced), Verdict::Serve(Order::Query));
    let mut strided = plain();
    strided.q.inner_stride = 2;
    check(&strided, &Verdict::Serve(Order::RowMajor));
}
