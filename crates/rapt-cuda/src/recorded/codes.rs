//! Codes in place of k and v: what a launch is passed beside the rest.

use rapt_core::{ScaleLayout, swizzle};

use super::*;

#[test]
fn what_belongs_to_codes_is_passed_beside_the_rest() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    for (q_len, algorithm, launches) in [(1, Algorithm::DecodeCodes, 2), (100, Algorithm::Mma, 1)] {
        let request = Request { is_coded: true, ..Request::new(q_len, 5000) };
        assert_eq!(launch_plan(&recorded.plan(request).unwrap()).variant().unwrap().algorithm, algorithm);
        let ran = recorded.run(request, 1 << 24).unwrap();
        assert_eq!(ran.len(), launches, "{ran:?}");
        let Call::Launch { params, .. } = &ran[0] else { panic!("{ran:?}") };
        assert_eq!(params.len(), LaunchParams::bytes_of(true, false));
        let word = |at: usize| usize::from_le_bytes(params[at..at + 8].try_into().unwrap());
        let (first, each) = (size_of::<Params>(), (LaunchParams::bytes_of(true, false) - size_of::<Params>()) / 3);
        let descales = [0, 1, 2].map(|operand| word(first + operand * each));
        assert_eq!(descales, [0, at(6, 0).addr(), at(7, 0).addr()]);
        // Of rows of descale, and what a code is: none of q, int8 of k and v.
        let of = |operand: usize, field: usize| word(first + operand * each + field);
        assert_eq!([of(1, 16), of(1, 24), of(1, 32)], [0, 5000, 1]);
        assert_eq!([0, 1, 2].map(|operand| of(operand, 80) >> 32), [0, 1, 1]);
        if let Some(Call::Launch { params, .. }) = ran.get(1) {
            assert_eq!(params.len(), size_of::<Params>());
        }
    }
}

#[test]
fn how_factors_lie_is_passed_with_them() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let (q_len, kv_len, head_dim, format) = (1, 300, 128, Format::Nvfp4);
    let device = Device::Cuda(0);
    let read = |name, n: usize, dtype, shape: &[usize]| {
        let shape = Shape::new(shape).unwrap();
        let strides = shape.contiguous().unwrap();
        // SAFETY: the recorded driver reads nothing.
        unsafe { View::from_raw_parts(name, at(n, 0), dtype, shape, strides, device, Extent::Declared) }.unwrap()
    };
    let (q, shape) = (read("q", 1, DType::BF16, &[1, 2, q_len, head_dim]), Shape::from([1, 2, q_len, head_dim]));
    let [k, v] =
        [("k", 2), ("v", 3)].map(|(name, n)| read(name, n, format.code_dtype(), &[1, 2, kv_len, head_dim / 2]));
    let matrix = swizzle::padded_numel(kv_len, head_dim / 16).unwrap();
    let swizzled = read("k_descale", 6, format.scale_dtype(), &[1, 2, matrix]);
    let plain = read("v_descale", 7, format.scale_dtype(), &[1, 2, kv_len, head_dim / 16]);
    let codes = |descale, scale_layout| {
        Some(Box::new(Codes { scale_layout, ..Codes::new(format, descale) }.with_global_scale(1.0)))
    };
    let codes = Qkv { q: None, k: codes(swizzled, ScaleLayout::Swizzle32x4x4), v: codes(plain, ScaleLayout::Plain) };
    // SAFETY: the recorded driver writes nothing.
    let out = unsafe {
        ViewMut::from_raw_parts(
            "out",
            at(4, 0),
            DType::BF16,
            shape,
            shape.contiguous().unwrap(),
            device,
            Extent::Declared,
        )
    };
    let out = out.unwrap();
    let spec = Spec::builder(&q, &k, &v, &Options::default()).codes(codes.as_deref()).out(&out).build().unwrap();
    let plan = recorded.backend.plan(&spec).unwrap();
    assert_eq!(launch_plan(&plan).variant().unwrap().algorithm, Algorithm::DecodeCodes);
    let mut operands = Operands::check(Tensors { codes, ..Tensors::new(q, k, v, out) }, plan.spec()).unwrap();
    recorded.log.take();
    // SAFETY: the recorded driver touches no memory.
    recorded
        .log
        .during_run(|| unsafe { recorded.backend.run(&plan, &mut operands, DeviceMemory::default(), 77) })
        .unwrap();
    let calls = recorded.log.take();
    let Some(Call::Launch { params, .. }) = calls.first() else { panic!("{calls:?}") };
    let (first, each) = (size_of::<Params>(), (LaunchParams::bytes_of(true, false) - size_of::<Params>()) / 3);
    let word = |operand: usize, field: usize| {
        usize::from_le_bytes(params[first + operand * each + field..][..8].try_into().unwrap())
    };
    // From head to head, along the matrix and along it again, and two tiles for 8 factors of a row; of v in rows.
    assert_eq!([16, 24, 32, 40].map(|field| word(1, field)), [0, matrix, 1, 1]);
    assert_eq!([16, 24, 32, 40].map(|field| word(2, field)), [0, kv_len * 8, 8, 1]);
    assert_eq!([1, 2].map(|operand| word(operand, 96) >> 32), [2, 0]);
}
