//! Quantizing and back: the error bound, strides, dtypes, scales at the ends of their range, and every refusal.

use half::{bf16, f16};
use proptest::prelude::*;
use rapt_core::{DType, Error, ErrorKind, Shape, View, ViewMut};
use rapt_quant::{
    Form, Format, Given, Granularity, Parts, QuantError, Quantized, QuantizedView, ScaleLayout, Scheme, quantize,
    quantize_with_global,
};

const PLAIN: [Format; 5] = [Format::Int8, Format::Uint8, Format::Int4, Format::E4m3fn, Format::E5m2];
const GRANULARITIES: [Granularity; 5] =
    [Granularity::Tensor, Granularity::Head, Granularity::Token, Granularity::Channel, Granularity::Block(3)];

fn scheme(format: Format, granularity: Granularity) -> Scheme {
    let granularity = format.own_block_size().map_or(granularity, Granularity::Block);
    Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap()
}

fn of(data: &[f32], shape: Shape, scheme: Scheme) -> Result<Quantized, QuantError> {
    quantize(&View::contiguous("x", data, shape).unwrap(), scheme, None)
}

/// The distance of neighbouring numbers of the format at `size` times its scale; what saturates counts as the last step.
fn step(format: Format, size: f64) -> f64 {
    let (mantissa_bits, least) = match format {
        Format::Int8 | Format::Uint8 | Format::Int4 => return 1.0,
        Format::E4m3fn | Format::Mxfp8 => (3, -6),
        Format::E5m2 => (2, -14),
        _ => (1, 0),
    };
    let exponent = if size == 0.0 { least } else { (size.log2().floor() as i32).max(least) };
    2f64.powi(exponent - mantissa_bits)
}

/// Of each element, the number that its code is multiplied by. Found from the shapes alone.
fn scales(quantized: &Quantized) -> Vec<f64> {
    let form = quantized.form();
    let shape: [usize; 3] = form.shape().to_vec().try_into().unwrap();
    let each = |group: usize| match (quantized.scale_f32(), quantized.scale_bytes(), form.format()) {
        (Some(scale), ..) => f64::from(scale[group]),
        (_, Some(scale), Format::Nvfp4) => {
            f64::from(Format::E4m3fn.decode(scale[group])) * f64::from(quantized.global_scale().unwrap())
        }
        (_, Some(scale), _) => 2f64.powi(i32::from(scale[group]) - 127),
        _ => unreachable!(),
    };
    let [heads, rows, columns] = shape;
    let mut all = Vec::new();
    for h in 0..heads {
        for s in 0..rows {
            for d in 0..columns {
                all.push(each(match form.scheme().granularity() {
                    Granularity::Tensor => 0,
                    Granularity::Head => h,
                    Granularity::Token => h * rows + s,
                    Granularity::Channel => h * columns + d,
                    Granularity::Block(size) => (h * rows + s) * columns.div_ceil(size) + d / size,
                }));
            }
        }
    }
    all
}

/// |x − dequantize(quantize(x))| is at most half a step; an element that MX's rule of the scale saturates may miss by its distance
/// to the largest number, which is below a quarter of itself.
fn within_half_a_step(data: &[f32], shape: Shape, scheme: Scheme) -> Result<(), TestCaseError> {
    let quantized = of(data, shape, scheme).unwrap();
    let back = quantized.view().unwrap().to_f32().unwrap();
    let format = scheme.format();
    for ((&x, &y), scale) in data.iter().zip(&back).zip(scales(&quantized)) {
        let (x, y) = (f64::from(x), f64::from(y));
        let size = x.abs() / scale;
        let rounding = y.abs() * 2f64.powi(-24);
        let mut bound = step(format, size.min(format.largest())) * scale / 2.0 * (1.0 + 1e-6) + rounding + 1e-45;
        if matches!(format, Format::Mxfp8 | Format::Mxfp4) && size > format.largest() {
            prop_assert!(size < format.largest() * 4.0 / 3.0);
            bound = x.abs() / 4.0;
        }
        prop_assert!((x - y).abs() <= bound, "{format}: {x:e} came back as {y:e} at scale {scale:e}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_comes_back_is_within_half_a_step(
        (shape, data) in (0usize..3, 0usize..4, 0usize..36).prop_flat_map(|(h, s, d)| {
            let number = (-1f32..1.0, prop_oneof![Just(0), -12..12, -148..120]).prop_map(|(x, e)| x * 2f32.powi(e));
            (Just([h, s, d]), prop::collection::vec(number, h * s * d))
        }),
    ) {
        for format in PLAIN {
            for granularity in GRANULARITIES {
                within_half_a_step(&data, shape.into(), scheme(format, granularity))?;
            }
        }
        for format in [Format::Mxfp8, Format::Mxfp4, Format::Nvfp4] {
            within_half_a_step(&data, shape.into(), scheme(format, Granularity::Tensor))?;
        }
    }
}

#[test]
fn any_strides_of_the_same_numbers_give_the_same_codes() {
    let data: Vec<f32> = (0u8..60).map(|n| (f32::from(n) - 17.3) * 0.37).collect();
    let shape = Shape::from([2, 3, 5]);
    // Forwards in steps of 2, and the same numbers laid down backwards with the matrix turned round.
    let forwards = View::strided("x", &data, 0, shape, [30, 10, 2].into()).unwrap();
    let mut turned = vec![f32::NAN; 60];
    for (n, x) in forwards.lines::<f32>("x").unwrap().elements().enumerate() {
        let (h, s, d) = (n / 15, n / 5 % 3, n % 5);
        turned[59 - h * 15 - s - d * 3] = x;
    }
    let turned = View::strided("x", &turned, 59, shape, [-15, -1, -3].into()).unwrap();
    for format in Format::ALL {
        for granularity in GRANULARITIES {
            let scheme = scheme(format, granularity);
            let [a, b] = [&forwards, &turned].map(|x| quantize(x, scheme, None).unwrap());
            assert_eq!(a, b, "{format} {granularity}");
            assert_eq!(a.form().nbytes(), {
                let scale = a.scale_bytes().map_or(0, <[u8]>::len) + a.scale_f32().map_or(0, |scale| 4 * scale.len());
                a.codes().len() + scale + a.zero_point().map_or(0, <[u8]>::len) + a.global_scale().map_or(0, |_| 4)
            });
        }
    }
    let expanded = View::strided("x", &data, 3, shape, [0, 0, 0].into()).unwrap();
    let quantized = quantize(&expanded, scheme(Format::Int8, Granularity::Token), None).unwrap();
    assert!(quantized.codes().iter().all(|&code| code == quantized.codes()[0]));
}

#[test]
fn the_same_numbers_in_any_dtype_give_the_same_codes() {
    let numbers: Vec<f64> = (-20..20).map(|n| f64::from(n) * 0.25).collect();
    let shape = Shape::from([4, 10]);
    let halves: Vec<f16> = numbers.iter().map(|&x| f16::from_f64(x)).collect();
    let bfloats: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f64(x)).collect();
    let singles: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    for format in Format::ALL {
        let scheme = scheme(format, Granularity::Token);
        let expected = quantize(&View::contiguous("x", &numbers, shape).unwrap(), scheme, None).unwrap();
        for x in [
            View::contiguous("x", &halves, shape).unwrap(),
            View::contiguous("x", &bfloats, shape).unwrap(),
            View::contiguous("x", &singles, shape).unwrap(),
        ] {
            assert_eq!(quantize(&x, scheme, None).unwrap(), expected, "{format} of {}", x.dtype());
        }
        let mut back = vec![0f64; 40];
        let mut out = ViewMut::strided("out", &mut back, 39, shape, [-10, -1].into()).unwrap();
        expected.view().unwrap().dequantize_into(&mut out).unwrap();
        back.reverse();
        for (x, y) in back.iter().zip(expected.view().unwrap().to_f32().unwrap()) {
            assert_eq!(*x as f32, y, "a product is rounded once");
        }
    }
}

#[test]
fn groups_of_zeros_have_scale_one() {
    for format in Format::ALL {
        let quantized = of(&[0.0; 12], [3, 4].into(), scheme(format, Granularity::Token)).unwrap();
        assert!(quantized.scale_f32().is_none_or(|scale| scale == [1.0; 3]), "{format}");
        let one = if format == Format::Nvfp4 { 0x38 } else { 127 };
        assert!(quantized.scale_bytes().is_none_or(|scale| scale == [one; 3]), "{format}");
        assert!(quantized.global_scale().is_none_or(|scale| scale == 1.0));
        assert_eq!(quantized.view().unwrap().to_f32().unwrap(), [0.0; 12]);
    }
}

#[test]
fn subnormal_scales_saturate_nothing() {
    let least = f32::from_bits(1);
    for reach in [least, 1.49 * 127.0 * least, 3.3 * 448.0 * least] {
        for format in [Format::Int8, Format::Uint8, Format::Int4, Format::E4m3fn, Format::E5m2] {
            let quantized = of(&[reach, -reach / 2.0], [2].into(), scheme(format, Granularity::Tensor)).unwrap();
            let scale = f64::from(quantized.scale_f32().unwrap()[0]);
            assert!(scale > 0.0 && f64::from(reach) / scale <= format.largest(), "{format} at {reach:e}: {scale:e}");
        }
    }
    // A block 2^-20 as large as its neighbour: its e4m3 scale is the least subnormal, not 0.
    let data: Vec<f32> = (0..32).map(|d| if d < 16 { 6.0 } else { 6.0 * 2f32.powi(-20) }).collect();
    let quantized = of(&data, [32].into(), scheme(Format::Nvfp4, Granularity::Tensor)).unwrap();
    assert_eq!(quantized.scale_bytes().unwrap(), [0x7e, 0x01]);
    // 1.5 steps of the least e4m3 number: up to 2, so that the largest element does not saturate.
    let data: Vec<f32> = (0..32).map(|d| if d < 16 { 448.0 } else { 1.4 * 2f32.powi(-9) }).collect();
    let quantized = of(&data, [32].into(), scheme(Format::Nvfp4, Granularity::Tensor)).unwrap();
    assert_eq!(quantized.scale_bytes().unwrap(), [0x7e, 0x02]);
    let quantized = of(&[2f32.powi(-149)], [1].into(), scheme(Format::Mxfp8, Granularity::Tensor)).unwrap();
    assert_eq!(quantized.scale_bytes().unwrap(), [0]);
}

#[test]
fn what_is_not_finite_is_refused_by_its_place_or_has_a_code() {
    for (bad, what) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut data = [1.0f32; 24];
        (data[15], data[22]) = (bad, f32::NAN);
        for format in Format::ALL {
            for granularity in GRANULARITIES {
                let answer = of(&data, [2, 3, 4].into(), scheme(format, granularity));
                if format.has_nan() {
                    let back = answer.unwrap().view().unwrap().to_f32().unwrap();
                    let expected = if format == Format::E5m2 { bad } else { f32::NAN };
                    assert!(back[15] == expected || back[15].is_nan() && expected.is_nan(), "{format}: {}", back[15]);
                    assert_eq!(back[0], 1.0, "the scale is that of finite elements");
                } else {
                    assert_eq!(answer, Err(QuantError::NoCode { index: [1, 0, 3].into(), what, format }));
                }
            }
        }
    }
    let error = of(&[1.0, f32::NAN], [1, 2].into(), scheme(Format::Int8, Granularity::Tensor)).unwrap_err();
    assert_eq!(error.to_string(), "x[0, 1] is NaN, for which int8 has no code");
    assert_eq!(error.kind(), ErrorKind::Number);
    for format in Format::ALL {
        let huge = View::contiguous("x", &[1e300f64], [1].into()).unwrap();
        let error = quantize(&huge, scheme(format, Granularity::Tensor), None).unwrap_err();
        assert!(matches!(error, QuantError::ScaleOverflow { reach: 1e300, .. }), "{format}: {error}");
    }
}

#[test]
fn a_given_scale_is_used_as_it_is() {
    let (data, scale, zero_point) = ([0.9f32, 2.5, -1e9, 1e9], [0.5f32, 2.0], [3u8, 200]);
    let x = View::contiguous("x", &data, [2, 2].into()).unwrap();
    let given = Given { scale: View::contiguous("scale", &scale, [2].into()).unwrap(), zero_point: None };
    let quantized = quantize(&x, scheme(Format::Int8, Granularity::Token), Some(&given)).unwrap();
    assert_eq!(quantized.codes(), [2, 5, 129, 127]);
    let with_zero =
        Given { zero_point: Some(View::contiguous("zero_point", &zero_point, [2].into()).unwrap()), ..given };
    let quantized = quantize(&x, scheme(Format::Uint8, Granularity::Token), Some(&with_zero)).unwrap();
    assert_eq!((quantized.codes(), quantized.zero_point()), (&[5, 8, 0, 255][..], Some(&zero_point[..])));
    let refused =
        |format, granularity, given: &Given<'_>| quantize(&x, scheme(format, granularity), Some(given)).unwrap_err();
    let missing = QuantError::Missing { part: "zero_point", format: Format::Uint8 };
    assert_eq!(refused(Format::Uint8, Granularity::Token, &given), missing);
    let unexpected = QuantError::Unexpected { part: "zero_point", format: Format::Int8 };
    assert_eq!(refused(Format::Int8, Granularity::Token, &with_zero), unexpected);
    assert_eq!(refused(Format::Int8, Granularity::Tensor, &given).kind(), ErrorKind::Shape);
    assert_eq!(refused(Format::Mxfp8, Granularity::Tensor, &given).kind(), ErrorKind::Option);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scale = [1.0, bad];
        let given = Given { scale: View::contiguous("scale", &scale, [2].into()).unwrap(), zero_point: None };
        let error = refused(Format::Int8, Granularity::Token, &given);
        assert!(matches!(&error, QuantError::BadScale { index, .. } if index[..] == [1]), "{bad}: {error}");
    }
}

#[test]
fn parts_are_checked_and_nothing_is_assumed() {
    let form = |format, granularity| Form::new(scheme(format, granularity), [2, 5].into()).unwrap();
    let (bytes, scales) = ([0u8; 64], [1f32; 16]);
    let codes = View::contiguous("codes", &bytes, [2, 5].into()).unwrap();
    let scale = View::contiguous("scale", &scales, [2].into()).unwrap();
    let parts = Parts { codes, scale: Some(scale), zero_point: None, global_scale: None };
    let int8 = form(Format::Int8, Granularity::Token);
    let refused = |form, parts| QuantizedView::new(form, parts).unwrap_err();
    let as_int8 = Parts { codes: codes.reinterpreted("codes", DType::I8).unwrap(), ..parts };
    assert!(QuantizedView::new(int8, as_int8).is_ok());
    assert!(matches!(refused(int8, parts), QuantError::Core(Error::OtherDtype { tensor: "codes", .. })));
    assert_eq!(
        refused(int8, Parts { scale: None, ..as_int8 }),
        QuantError::Missing { part: "scale", format: Format::Int8 }
    );
    let uint8 = form(Format::Uint8, Granularity::Token);
    assert_eq!(refused(uint8, parts), QuantError::Missing { part: "zero_point", format: Format::Uint8 });
    let zero_point = Some(View::contiguous("zero_point", &bytes, [2].into()).unwrap());
    assert!(QuantizedView::new(uint8, Parts { zero_point, ..parts }).is_ok());
    let longer = Some(View::contiguous("zero_point", &bytes, [3].into()).unwrap());
    assert_eq!(refused(uint8, Parts { zero_point: longer, ..parts }).kind(), ErrorKind::Shape);
    assert_eq!(
        refused(int8, Parts { global_scale: Some(1.0), ..as_int8 }),
        QuantError::Unexpected { part: "global_scale", format: Format::Int8 }
    );
    assert_eq!(refused(form(Format::Int8, Granularity::Tensor), as_int8).kind(), ErrorKind::Shape);
    assert_eq!(refused(form(Format::Int4, Granularity::Token), parts).kind(), ErrorKind::Shape);
    let nvfp4 = form(Format::Nvfp4, Granularity::Tensor);
    let codes = View::contiguous("codes", &bytes, [2, 3].into()).unwrap();
    let scale = View::contiguous("scale", &bytes, [2, 1].into()).unwrap();
    let as_e4m3 = scale.reinterpreted("scale", DType::F8E4M3FN).unwrap();
    let fp4 = Parts { codes, scale: Some(as_e4m3), zero_point: None, global_scale: None };
    assert_eq!(refused(nvfp4, fp4), QuantError::Missing { part: "global_scale", format: Format::Nvfp4 });
    assert!(QuantizedView::new(nvfp4, Parts { global_scale: Some(1.0), ..fp4 }).is_ok());
    let wrong = Parts { scale: Some(scale), global_scale: Some(1.0), ..fp4 };
    assert!(matches!(refused(nvfp4, wrong), QuantError::Core(Error::OtherDtype { tensor: "scale", .. })));
}

#[test]
fn schemes_and_ranks_are_checked() {
    let plain = |format, granularity| Scheme::new(format, Some(granularity), ScaleLayout::Plain);
    assert!(plain(Format::Mxfp8, Granularity::Tensor).is_err());
    assert!(plain(Format::Nvfp4, Granularity::Block(32)).is_err());
    assert!(plain(Format::Int8, Granularity::Block(0)).is_err());
    assert!(Scheme::new(Format::Int8, None, ScaleLayout::Swizzle32x4x4).is_err());
    let scheme = |format, granularity| plain(format, granularity).unwrap();
    for (scheme, shape, fits) in [
        (scheme(Format::Int8, Granularity::Tensor), &[][..], true),
        (scheme(Format::Int4, Granularity::Tensor), &[], false),
        (scheme(Format::Int8, Granularity::Token), &[], false),
        (scheme(Format::Int8, Granularity::Head), &[4], false),
        (scheme(Format::Int8, Granularity::Channel), &[4], false),
        (scheme(Format::Int8, Granularity::Channel), &[4, 4, 2, 2, 2, 2, 2, 2], true),
        (scheme(Format::Int8, Granularity::Block(1)), &[usize::MAX, 2], false),
    ] {
        assert_eq!(Form::new(scheme, Shape::new(shape).unwrap()).is_ok(), fits, "{scheme:?} {shape:?}");
    }
    let form = |granularity| *Form::new(scheme(Format::Int8, granularity), [2, 3, 5, 7].into()).unwrap().scale_shape();
    assert_eq!(
        GRANULARITIES.map(|it| form(it).to_vec()),
        [vec![], vec![2, 3], vec![2, 3, 5], vec![2, 3, 1, 7], vec![2, 3, 5, 3],]
    );
    let integers = View::contiguous("x", &[1i8], [1].into()).unwrap();
    let error = quantize(&integers, scheme(Format::Int8, Granularity::Tensor), None).unwrap_err();
    assert!(matches!(error, QuantError::Core(Error::UnsupportedDtype { tensor: "x", .. })));
}

#[test]
fn swizzled_scales_are_the_plain_ones_elsewhere() {
    let data: Vec<f32> = (0..2 * 130 * 170u32).map(|n| (n * 7919 % 1009) as f32 - 500.0).collect();
    let x = View::contiguous("x", &data, [2, 130, 170].into()).unwrap();
    for format in [Format::Mxfp8, Format::Mxfp4, Format::Nvfp4] {
        let plain = quantize(&x, Scheme::new(format, None, ScaleLayout::Plain).unwrap(), None).unwrap();
        let scheme = Scheme::new(format, None, ScaleLayout::Swizzle32x4x4).unwrap();
        let swizzled = quantize(&x, scheme, None).unwrap();
        let columns = 170usize.div_ceil(format.own_block_size().unwrap());
        let matrix = 256 * columns.next_multiple_of(4);
        assert_eq!(&**swizzled.form().scale_shape(), &[2, matrix]);
        assert_eq!(plain.codes(), swizzled.codes());
        let (plain_scale, scale) = (plain.scale_bytes().unwrap(), swizzled.scale_bytes().unwrap());
        for (n, code) in plain_scale.iter().enumerate() {
            let (h, s, c) = (n / columns / 130, n / columns % 130, n % columns);
            assert_eq!(scale[h * matrix + rapt_quant::swizzled(s, c, columns)], *code);
        }
        assert_eq!(scale.iter().filter(|code| **code != 0).count(), plain_scale.len(), "padding is 0");
        assert_eq!(plain.view().unwrap().to_f32(), swizzled.view().unwrap().to_f32());
    }
}

/// Codes of nvfp4 made with the factor of a tensor are those of the tensor, whatever part of it they are made of.
#[test]
fn a_part_has_the_codes_of_the_whole_with_its_factor() {
    let numbers: Vec<f32> = (0..96).map(|n| ((n * 37 % 41) as f32 - 20.0) * 0.3).collect();
    let scheme = Scheme::new(Format::Nvfp4, None, ScaleLayout::Plain).unwrap();
    let whole = quantize(&View::contiguous("x", &numbers, [3, 32].into()).unwrap(), scheme, None).unwrap();
    let global = whole.global_scale().unwrap();
    for row in 0..3 {
        let part = View::contiguous("x", &numbers[row * 32..][..32], [1, 32].into()).unwrap();
        let part = quantize_with_global(&part, scheme, global).unwrap();
        assert_eq!(part.codes(), &whole.codes()[row * 16..][..16], "{row}");
        assert_eq!(part.scale_bytes().unwrap(), &whole.scale_bytes().unwrap()[row * 2..][..2], "{row}");
        assert_eq!(part.global_scale(), Some(global));
    }
    let x = View::contiguous("x", &numbers, [3, 32].into()).unwrap();
    let far = quantize_with_global(&x, scheme, global / 2.0).unwrap_err();
    assert!(matches!(far, QuantError::ScaleOverflow { dtype: DType::F8E4M3FN, .. }), "{far}");
    for got in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(quantize_with_global(&x, scheme, got), Err(QuantError::BadScale { .. })), "{got}");
    }
    let int8 = Scheme::new(Format::Int8, None, ScaleLayout::Plain).unwrap();
    assert!(matches!(quantize_with_global(&x, int8, 1.0), Err(QuantError::Unexpected { part: "global_scale", .. })));
}
