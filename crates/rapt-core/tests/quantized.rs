//! What is said of codes beside their tensor: shapes of scales, parts that are missing or too many, dtypes that go together.

use rapt_core::{
    CodesForm, DType, Device, Error, ErrorKind, Format, Granularity, Options, Qkv, ScaleLayout, Shape, Spec,
    TensorForm, TensorLayout,
};

fn form(dtype: DType, shape: &[usize]) -> TensorForm {
    let shape = Shape::new(shape).unwrap();
    TensorForm::new(dtype, shape, shape.contiguous().unwrap(), Device::Cpu)
}

fn f32s(shape: &[usize]) -> TensorForm {
    form(DType::F32, shape)
}

fn of_k(codes: CodesForm) -> Qkv<Option<CodesForm>> {
    Qkv { k: Some(codes), ..Qkv::default() }
}

/// A spec of k as codes, in the layout of `options`: `[batch, heads, len, head_dim]` or in that order.
fn with_k(q: &[usize], k: &[usize], codes: CodesForm, options: &Options) -> Result<Spec, Error> {
    let q = f32s(q);
    let plain = f32s(&(0..k.len()).map(|d| if d + 1 == k.len() { q.shape[d] } else { k[d] }).collect::<Vec<_>>());
    let k = form(codes.format.code_dtype(), k);
    Spec::builder(q, k, plain, options).codes(of_k(codes)).build()
}

#[test]
fn the_shape_of_a_descale_names_its_granularity() {
    use Granularity::{Block, Channel, Head, Tensor, Token};
    let (bhsd, bshd) = (TensorLayout::Bhsd, TensorLayout::Bshd);
    // Layout, q, k, descale; granularity, canonical strides, elements that share a factor.
    type Row = (TensorLayout, &'static [usize], &'static [usize], &'static [usize], Granularity, [isize; 4], usize);
    let rows: &[Row] = &[
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[], Tensor, [0, 0, 0, 0], 12),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[2, 3], Head, [3, 1, 0, 0], 12),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[2, 3, 7], Token, [21, 7, 1, 0], 12),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[2, 3, 1, 12], Channel, [36, 12, 0, 1], 1),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[2, 3, 7, 3], Block(4), [63, 21, 3, 1], 4),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 7, 12], &[2, 3, 7, 1], Block(12), [21, 7, 1, 0], 12),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 1, 12], &[2, 3, 1, 12], Channel, [36, 12, 0, 1], 1),
        (bhsd, &[2, 6, 5, 12], &[2, 3, 1, 12], &[2, 3, 1, 3], Block(4), [9, 3, 0, 1], 4),
        (bshd, &[2, 5, 6, 12], &[2, 7, 3, 12], &[], Tensor, [0, 0, 0, 0], 12),
        (bshd, &[2, 5, 6, 12], &[2, 7, 3, 12], &[2, 3], Head, [3, 1, 0, 0], 12),
        (bshd, &[2, 5, 6, 12], &[2, 7, 3, 12], &[2, 7, 3], Token, [21, 1, 3, 0], 12),
        (bshd, &[2, 5, 6, 12], &[2, 7, 3, 12], &[2, 1, 3, 12], Channel, [36, 12, 0, 1], 1),
        (bshd, &[2, 5, 6, 12], &[2, 7, 3, 12], &[2, 7, 3, 3], Block(4), [63, 3, 9, 1], 4),
        (bhsd, &[6, 5, 12], &[3, 7, 12], &[3], Head, [0, 1, 0, 0], 12),
        (bhsd, &[6, 5, 12], &[3, 7, 12], &[3, 7], Token, [0, 7, 1, 0], 12),
        (bhsd, &[6, 5, 12], &[3, 7, 12], &[3, 1, 12], Channel, [0, 12, 0, 1], 1),
        (bshd, &[5, 6, 12], &[7, 3, 12], &[3], Head, [0, 1, 0, 0], 12),
        (bshd, &[5, 6, 12], &[7, 3, 12], &[7, 3], Token, [0, 1, 3, 0], 12),
        (bshd, &[5, 6, 12], &[7, 3, 12], &[7, 3, 2], Block(6), [0, 2, 6, 1], 6),
        (bhsd, &[5, 12], &[7, 12], &[], Tensor, [0, 0, 0, 0], 12),
        (bhsd, &[5, 12], &[7, 12], &[7], Token, [0, 0, 1, 0], 12),
        (bhsd, &[5, 12], &[7, 12], &[1, 12], Channel, [0, 0, 0, 1], 1),
        (bhsd, &[5, 12], &[7, 12], &[7, 6], Block(2), [0, 0, 6, 1], 2),
    ];
    for &(layout, q, k, descale, granularity, strides, chunk) in rows {
        let options = Options::default().with_layout(layout);
        let spec = with_k(q, k, CodesForm::new(Format::Int8, f32s(descale)), &options)
            .unwrap_or_else(|error| panic!("{layout:?} {k:?} {descale:?}: {error}"));
        let codes = spec.codes.k.as_deref().unwrap();
        assert_eq!((codes.granularity, codes.chunk), (granularity, chunk), "{layout:?} {k:?} {descale:?}");
        // A dimension of one group may have any stride: it is never stepped along.
        let seen: Vec<isize> =
            (0..4).map(|d| if codes.descale.shape[d] > 1 { codes.descale.strides[d] } else { 0 }).collect();
        assert_eq!(seen, strides, "{layout:?} {k:?} {descale:?}");
        assert_eq!(codes.descale.shape, [spec.batch(), spec.num_kv_heads(), spec.kv_len(), 12usize.div_ceil(chunk)]);
    }
}

#[test]
fn a_shape_of_no_granularity_is_refused_with_those_that_there_are() {
    let shapes: [&[usize]; 8] =
        [&[1], &[3], &[2, 4], &[2, 7, 3], &[2, 3, 1, 6], &[2, 3, 7, 5], &[2, 3, 7, 0], &[1, 2, 3, 7, 3]];
    for shape in shapes {
        let codes = CodesForm::new(Format::Int8, f32s(shape));
        let error = with_k(&[2, 6, 5, 12], &[2, 3, 7, 12], codes, &Options::default()).unwrap_err();
        assert_eq!((error.kind(), error.tensor()), (ErrorKind::Shape, Some("k_descale")), "{shape:?}: {error}");
        let shapes = "[] (tensor), [2, 3] (head), [2, 3, 7] (token), [2, 3, 1, 12] (channel), and [2, 3, 7]";
        assert!(error.to_string().contains(shapes), "{error}");
    }
    // Blocks of their own size, however few elements a row has.
    for (format, dim, shape, fits) in [
        (Format::Mxfp8, 40, [2, 3, 7, 2], true),
        (Format::Mxfp8, 40, [2, 3, 7, 1], false),
        (Format::Mxfp8, 16, [2, 3, 7, 1], true),
        (Format::Mxfp8, 64, [2, 3, 7, 4], false),
        (Format::Mxfp8, 40, [2, 3, 1, 40], false),
    ] {
        let codes = CodesForm::new(format, form(format.scale_dtype(), &shape));
        let spec = with_k(&[2, 6, 5, dim], &[2, 3, 7, dim], codes, &Options::default());
        assert_eq!(spec.is_ok(), fits, "{format} {dim} {shape:?}: {spec:?}");
    }
}

#[test]
fn a_block_that_does_not_divide_a_row_is_stated() {
    let descale = f32s(&[2, 3, 7, 2]);
    for (stated, dim, chunk) in [
        (None, 10, Some(5)),
        (None, 11, None),
        (Some(Granularity::Block(6)), 10, Some(6)),
        (Some(Granularity::Block(9)), 10, Some(9)),
        (Some(Granularity::Block(10)), 10, None),
        (Some(Granularity::Block(6)), 11, Some(6)),
        (Some(Granularity::Token), 10, None),
    ] {
        let codes = CodesForm { granularity: stated, ..CodesForm::new(Format::E5m2, descale) };
        let spec = with_k(&[2, 6, 5, dim], &[2, 3, 7, dim], codes, &Options::default());
        assert_eq!(
            spec.as_ref().ok().map(|spec| spec.codes.k.as_deref().unwrap().chunk),
            chunk,
            "{stated:?} {dim}: {spec:?}"
        );
    }
    // What a quantizer that knows no layout calls a head is none in bshd.
    for (granularity, shape) in [(Granularity::Head, vec![2, 5]), (Granularity::Channel, vec![2, 5, 1, 12])] {
        let codes = CodesForm { granularity: Some(granularity), ..CodesForm::new(Format::Int8, f32s(&shape)) };
        let options = Options::default().with_layout(TensorLayout::Bshd);
        let error = with_k(&[2, 5, 5, 12], &[2, 5, 5, 12], codes, &options).unwrap_err();
        assert!(matches!(error, Error::Option { option: "granularity", .. }), "{error}");
    }
}

#[test]
fn codes_without_a_part_are_no_numbers() {
    let (q, k) = (form(DType::BF16, &[2, 6, 5, 12]), |dtype| form(dtype, &[2, 3, 7, 12]));
    let plain = k(DType::BF16);
    for dtype in [DType::I8, DType::U8, DType::F8E4M3FN, DType::F8E5M2] {
        let error = Spec::builder(q, k(dtype), plain, &Options::default()).build().unwrap_err();
        assert_eq!(error, Error::MissingPart { tensor: "k", codes: dtype.name(), part: "k_descale" });
        assert!(error.to_string().contains("nothing is assumed"));
        let error = Spec::builder(q, plain, k(dtype), &Options::default()).build().unwrap_err();
        assert_eq!(error, Error::MissingPart { tensor: "v", codes: dtype.name(), part: "v_descale" });
    }
    let error = Spec::builder(q, k(DType::I32), plain, &Options::default()).build().unwrap_err();
    assert!(matches!(error, Error::DtypeMismatch { tensor: "k", .. }), "{error}");

    let build = |codes: CodesForm| {
        let k = form(codes.format.code_dtype(), &[2, 3, 7, 12usize.div_ceil(codes.format.codes_per_byte())]);
        Spec::builder(q, k, plain, &Options::default()).codes(of_k(codes)).build()
    };
    let scale = |format: Format, shape: &[usize]| CodesForm::new(format, form(format.scale_dtype(), shape));
    let points = |dtype, shape: &[usize]| form(dtype, shape);
    let head = scale(Format::Uint8, &[2, 3]);
    assert!(build(head.with_zero_point(points(DType::U8, &[2, 3]))).is_ok());
    let missing = |codes, part| Error::MissingPart { tensor: "k", codes, part };
    assert_eq!(build(head).unwrap_err(), missing("uint8", "k_zero_point"));
    assert_eq!(build(scale(Format::Nvfp4, &[2, 3, 7, 1])).unwrap_err(), missing("nvfp4", "k_global_scale"));
    let error = build(head.with_zero_point(points(DType::I8, &[2, 3]))).unwrap_err();
    assert_eq!(error, Error::OtherDtype { tensor: "k_zero_point", expected: DType::U8, got: DType::I8 });
    let error = build(head.with_zero_point(points(DType::U8, &[]))).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { tensor: "k_zero_point", .. }), "{error}");
    let unexpected = |codes, part| Error::UnexpectedPart { tensor: "k", codes, part };
    let error = build(scale(Format::Int8, &[]).with_zero_point(points(DType::U8, &[]))).unwrap_err();
    assert_eq!((&error, error.kind()), (&unexpected("int8", "k_zero_point"), ErrorKind::Option));
    let error = build(CodesForm { has_global_scale: true, ..scale(Format::E4m3fn, &[]) }).unwrap_err();
    assert_eq!(error, unexpected("e4m3fn", "k_global_scale"));
    let error = build(CodesForm::new(Format::Int8, form(DType::F16, &[]))).unwrap_err();
    assert_eq!(error, Error::OtherDtype { tensor: "k_descale", expected: DType::F32, got: DType::F16 });
    let mut elsewhere = scale(Format::Int8, &[]);
    elsewhere.descale.device = Device::Cuda(0);
    assert!(matches!(build(elsewhere).unwrap_err(), Error::DeviceMismatch { tensor: "k_descale", .. }));
    // The tensor under the scales is none of codes.
    let error =
        Spec::builder(q, plain, plain, &Options::default()).codes(of_k(scale(Format::Int8, &[]))).build().unwrap_err();
    assert_eq!(error, Error::OtherDtype { tensor: "k", expected: DType::I8, got: DType::BF16 });
}

#[test]
fn dtypes_that_go_with_codes() {
    let codes = CodesForm::new(Format::E4m3fn, f32s(&[]));
    let coded = form(DType::F8E4M3FN, &[1, 2, 3, 8]);
    let plain = |dtype| form(dtype, &[1, 2, 3, 8]);
    let build = |q: DType, k: Option<DType>, v: Option<DType>, out_dtype: Option<DType>| {
        let codes = Qkv {
            q: (q == DType::F8E4M3FN).then_some(codes),
            k: k.is_none().then_some(codes),
            v: v.is_none().then_some(codes),
        };
        let options = Options { out_dtype, ..Options::default() };
        Spec::builder(plain(q), k.map_or(coded, plain), v.map_or(coded, plain), &options).codes(codes).build()
    };
    let (bf16, f16, f64, e4m3) = (DType::BF16, DType::F16, DType::F64, DType::F8E4M3FN);
    let spec = build(bf16, None, Some(bf16), None).unwrap();
    assert_eq!((spec.numerics.storage, spec.numerics.accumulation, spec.out.dtype), (bf16, DType::F32, bf16));
    assert_eq!(build(f16, Some(bf16), None, None).unwrap_err().kind(), ErrorKind::DtypeMismatch);
    assert!(matches!(
        build(e4m3, Some(f16), Some(bf16), Some(f16)).unwrap_err(),
        Error::OtherDtype { tensor: "v", .. }
    ));
    let error = build(e4m3, None, None, None).unwrap_err();
    assert!(matches!(error, Error::Option { option: "out_dtype", .. }), "{error}");
    let spec = build(e4m3, None, None, Some(f16)).unwrap();
    assert_eq!((spec.numerics.storage, spec.out.dtype), (DType::F32, f16));
    assert_eq!(build(e4m3, Some(bf16), None, Some(f16)).unwrap().numerics.storage, bf16);
    let error = build(f64, None, Some(f64), None).unwrap_err();
    assert!(error.to_string().contains("q in float64 with k of e4m3fn codes"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(build(bf16, None, None, Some(f64)).is_err());
}

#[test]
fn packed_codes_have_the_sizes_of_their_numbers() {
    let q = f32s(&[1, 2, 3, 9]);
    let k = form(DType::U8, &[1, 2, 4, 5]);
    let v = form(DType::U8, &[1, 2, 4, 3]);
    let codes = |head_dim| CodesForm { head_dim, ..CodesForm::new(Format::Int4, f32s(&[1, 2, 4])) };
    let build = |k_dim, v_dim| {
        let codes = Qkv { q: None, k: Some(codes(k_dim)), v: Some(codes(v_dim)) };
        Spec::builder(q, k, v, &Options::default()).codes(codes).build()
    };
    let spec = build(Some(9), None).unwrap();
    assert_eq!(
        (spec.head_dim(), spec.head_dim_v(), spec.k.strides, spec.v.shape),
        (9, 6, [40, 20, 5, 1], [1, 2, 4, 6])
    );
    assert_eq!((spec.codes.k.unwrap().code_bytes(&spec.k), spec.codes.v.unwrap().scale_bytes()), (40, 32));
    assert_eq!(build(Some(9), Some(5)).unwrap().head_dim_v(), 5);
    assert!(matches!(
        build(None, None).unwrap_err(),
        Error::SizeMismatch { tensor: "k", size: "head_dim", got: 10, .. }
    ));
    for wrong in [7, 11, 0, usize::MAX] {
        assert!(
            matches!(build(Some(9), Some(wrong)).unwrap_err(), Error::ShapeMismatch { tensor: "v", .. }),
            "{wrong}"
        );
    }
}

#[test]
fn swizzled_scales_are_a_flat_matrix_for_each_head() {
    let swizzled = |format: Format, shape: &[usize]| CodesForm {
        scale_layout: ScaleLayout::Swizzle32x4x4,
        has_global_scale: format.has_global_scale(),
        ..CodesForm::new(format, form(format.scale_dtype(), shape))
    };
    let (bhsd, bshd) = (Options::default(), Options { layout: TensorLayout::Bshd, ..Options::default() });
    // q, k as bytes, scales; canonical sizes and strides, and bytes of scales.
    type Row = (Format, &'static [usize], &'static [usize], &'static [usize], [usize; 4], [isize; 4], u128);
    let rows: &[Row] = &[
        (Format::Mxfp8, &[2, 6, 5, 64], &[2, 3, 7, 64], &[2, 3, 512], [2, 3, 7, 2], [1536, 512, 1, 1], 6 * 512),
        (Format::Mxfp4, &[2, 6, 5, 160], &[2, 3, 129, 80], &[2, 3, 2048], [2, 3, 129, 5], [6144, 2048, 1, 1], 6 * 2048),
        (Format::Nvfp4, &[6, 5, 64], &[3, 128, 32], &[3, 512], [1, 3, 128, 4], [0, 512, 1, 1], 3 * 512 + 4),
        (Format::Nvfp4, &[5, 16], &[1, 8], &[512], [1, 1, 1, 1], [0, 0, 1, 1], 512 + 4),
    ];
    for &(format, q, k, scales, sizes, strides, bytes) in rows {
        let codes = swizzled(format, scales);
        let spec = with_k(q, k, codes, &bhsd).unwrap();
        let of_k = spec.codes.k.unwrap();
        assert_eq!((of_k.descale.shape, of_k.descale.strides), (sizes, strides), "{format} {scales:?}");
        assert_eq!((of_k.scale_layout, of_k.scale_bytes()), (ScaleLayout::Swizzle32x4x4, bytes), "{format} {scales:?}");
        assert_eq!(of_k.granularity, Granularity::Block(format.own_block_size().unwrap()));
    }
    // Shapes of scales in rows, of too few scales, of scales without their heads.
    for scales in [&[2, 3, 7, 2][..], &[2, 3, 14], &[2, 3, 511], &[3, 2, 512], &[3, 512], &[512], &[]] {
        let error = with_k(&[2, 6, 5, 64], &[2, 3, 7, 64], swizzled(Format::Mxfp8, scales), &bhsd).unwrap_err();
        assert!(matches!(error, Error::DescaleShape { tensor: "k_descale", .. }), "{scales:?}: {error}");
        assert!(error.to_string().contains("[2, 3, 512]: of each head 7×2 factors"), "{error}");
    }
    let refused = |codes: CodesForm, options: &Options, says: &str| {
        let error = with_k(&[2, 7, 6, 64], &[2, 7, 6, 64], codes, options).unwrap_err();
        assert!(matches!(error, Error::Option { option: "scale_layout", .. }), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    };
    refused(swizzled(Format::Mxfp8, &[2, 7, 512]), &bshd, "'plain', or layout 'bhsd'");
    refused(swizzled(Format::E4m3fn, &[]), &bhsd, "'plain': the scales of e4m3fn are float32");
    let elsewhere = CodesForm::new(Format::Mxfp8, form(DType::F8E8M0FNU, &[2, 3, 512]));
    let error = with_k(&[2, 6, 5, 64], &[2, 3, 7, 64], elsewhere, &bhsd).unwrap_err();
    assert!(matches!(error, Error::DescaleShape { .. }), "what is swizzled is said: {error}");
}

#[test]
fn swizzled_scales_do_not_lie_in_pages() {
    let options = Options::default();
    let codes = CodesForm {
        scale_layout: ScaleLayout::Swizzle32x4x4,
        ..CodesForm::new(Format::Mxfp8, form(DType::F8E8M0FNU, &[4, 2, 512]))
    };
    let (q, pages) = (f32s(&[1, 2, 1, 64]), form(DType::F8E4M3FN, &[4, 2, 16, 64]));
    let codes = Qkv { q: None, k: Some(codes), v: Some(codes) };
    let mut builder = Spec::builder(q, pages, pages, &options);
    let error = builder.codes(codes).pages(form(DType::I32, &[2]), 20).build().unwrap_err();
    assert!(matches!(error, Error::Option { option: "scale_layout", .. }), "{error}");
}
