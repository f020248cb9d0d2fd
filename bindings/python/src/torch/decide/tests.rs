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
    assert_eq!(answer(&asks, grad), Verdict::Serve(Order::Query));
    let on = |device| {
        let mut asks = asks.clone();
        for tensor in [&mut asks.q, &mut asks.k, &mut asks.v] {
            tensor.device = device;
        }
        asks
    };
    assert_eq!(answer(&on(Device::Mps(0)), grad), Verdict::Fallback(Reason::RequiresGrad("k")));
    let Ok(on_gpu) = decide(&on(Device::Cuda(0)), grad, Stock::NEWEST, || Ok::<_, Infallible>(Some(Kernel::Flash)));
    assert_eq!(on_gpu, Verdict::Serve(Order::Query));
    // PyTorch's flash kernel takes no mask that asks for a gradient.
    let mask = |requires_grad| Some(Tensor { requires_grad, ..tensor(&[6, 5]) });
    check(&Request { mask: mask(false), ..plain() }, &Verdict::Serve(Order::Query));
    check(&Request { mask: mask(true), ..plain() }, &Verdict::Serve(Order::RowMajor));
    let forward_ad = Modes { forward_ad: true, ..Modes::ORDINARY };
    assert_eq!(answer(&plain(), forward_ad), Verdict::Fallback(Reason::ForwardAd));
    let only_math = Modes { allowed: Allowed { fused: false, math: true }, ..Modes::ORDINARY };
    assert_eq!(answer(&plain(), only_math), Verdict::Fallback(Reason::OnlyMath));
    let no_math = Modes { allowed: Allowed { fused: true, math: false }, ..Modes::ORDINARY };
    let wide = request(&[2, 4, 6, 8], &[2, 4, 5, 8], &[2, 4, 5, 3]);
    assert_eq!(answer(&plain(), no_math), Verdict::Serve(Order::Query));
    assert_eq!(answer(&wide, no_math), Verdict::Fallback(Reason::KernelNotAllowed));
    // PyTorch's math path drops; its flash kernel does not.
    for dropout_p in [0.5, 1.0] {
        check(&Request { dropout_p, ..plain() }, &Verdict::Serve(Order::RowMajor));
    }
    let dropping = Request { dropout_p: 0.5, ..plain() };
    assert_eq!(answer(&Request { dropout_p: 0.5, ..asks.clone() }, grad), Verdict::Serve(Order::RowMajor));
    check(&Request { dropout_p: 0.5, ..asks }, &Verdict::Serve(Order::RowMajor));
    assert_eq!(answer(&dropping, no_math), Verdict::Fallback(Reason::KernelNotAllowed));
    for dropout_p in [-1.0, 1.5, f64::NAN] {
        check(&Request { dropout_p, ..plain() }, &Verdict::Fallback(Reason::Dropout));
    }
    let mut on_gpu = Request { dropout_p: 0.5, ..plain() };
    for tensor in [&mut on_gpu.q, &mut on_gpu.k, &mut on_gpu.v] {
        tensor.device = Device::Cuda(0);
    }
    check(&on_gpu, &Verdict::Serve(Order::Query));
    for tensor in [&mut on_gpu.q, &mut on_gpu.k, &mut on_gpu.v] {
        tensor.device = Device::Mps(0);
    }
    check(&Request { dropout_p: 0.5, ..on_gpu }, &Verdict::Fallback(Reason::Dropout));
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

fn nested(request: &Request<usize>, nests: [Nest; 3]) -> Verdict {
    let Ok(verdict) = decide_jagged(request, nests, Modes::ORDINARY, Stock::NEWEST);
    verdict
}

#[test]
fn a_nested_request_is_the_dense_one_of_its_sequences() {
    let all = [Nest::Sequences; 3];
    // [batch, heads, one row of a sequence, head_dim].
    let one = |batch, heads, head_dim| vec![batch, heads, 1, head_dim];
    let of = |q: [usize; 3], k: [usize; 3], v: [usize; 3]| {
        let [q, k, v] = [q, k, v].map(|[batch, heads, head_dim]| one(batch, heads, head_dim));
        request(&q, &k, &v)
    };
    let served = Verdict::Serve(Order::Bshd);
    for taken in [
        of([2, 4, 8], [2, 4, 8], [2, 4, 3]),
        of([2, 4, 8], [2, 1, 8], [2, 4, 8]),
        of([2, 1, 8], [2, 4, 8], [2, 4, 8]),
        of([0, 4, 8], [0, 4, 8], [0, 4, 8]),
        Request { enable_gqa: true, ..of([2, 4, 8], [2, 2, 8], [2, 2, 8]) },
        Request { is_causal: true, scale: Some(0.3), ..of([2, 4, 8], [2, 4, 8], [2, 4, 8]) },
    ] {
        assert_eq!(nested(&taken, all), served, "{taken:?}");
    }
    let plain = of([2, 4, 8], [2, 4, 8], [2, 4, 8]);
    let gqa = |k_heads, v_heads| Request { enable_gqa: true, ..of([2, 4, 8], [2, k_heads, 8], [2, v_heads, 8]) };
    let mask = Some(Tensor { dtype: Ok(DType::Bool), ..tensor(&[1, 1]) });
    let mut on_gpu = plain.clone();
    for tensor in [&mut on_gpu.q, &mut on_gpu.k, &mut on_gpu.v] {
        tensor.device = Device::Cuda(0);
    }
    assert_eq!(nested(&on_gpu, all), served);
    let whole_gpu = on_gpu.clone();
    on_gpu.k.device = Device::Cpu;
    for (refused, expected) in [
        (of([2, 4, 8], [3, 4, 8], [3, 4, 8]), invalid(Invalid::Broadcast { heads: false })),
        (of([2, 4, 8], [1, 4, 8], [1, 4, 8]), invalid(Invalid::Broadcast { heads: false })),
        (of([2, 4, 8], [2, 3, 8], [2, 3, 8]), invalid(Invalid::Broadcast { heads: true })),
        (of([2, 4, 8], [2, 4, 7], [2, 4, 8]), invalid(Invalid::HeadDim)),
        (gqa(3, 3), invalid(Invalid::Groups)),
        (gqa(4, 2), invalid(Invalid::Groups)),
        (Request { mask, ..plain.clone() }, invalid(Invalid::NestedMask)),
        (Request { dropout_p: 1.5, ..plain.clone() }, Verdict::Fallback(Reason::Dropout)),
        (on_gpu, invalid(Invalid::Device("k"))),
    ] {
        assert_eq!(nested(&refused, all), expected, "{refused:?}");
    }
    for tensors in [&plain, &whole_gpu] {
        assert_eq!(nested(&Request { dropout_p: 0.5, ..tensors.clone() }, all), served);
    }
    let grad = Modes { grad: true, ..Modes::ORDINARY };
    for mut asks in [plain.clone(), whole_gpu] {
        asks.v.requires_grad = true;
        assert_eq!(nested(&asks, all), served);
        let Ok(verdict) = decide_jagged(&asks, all, grad, Stock::NEWEST);
        assert_eq!(verdict, served);
    }
    assert_eq!(nested(&plain, [Nest::Sequences, Nest::Not, Nest::Not]), invalid(Invalid::NotNested("k")));
    assert_eq!(nested(&plain, [Nest::Otherwise; 3]), Verdict::Fallback(Reason::Layout("jagged".to_owned())));
}
