//! What is measured of a quantized tensor, against plain sums in f64.

use rapt_core::{Codes, Error, View};
use rapt_quant::{Format, Granularity, Measured, QuantError, QuantizedView, ScaleLayout, Scheme, measure, quantize};

fn numbers(n: usize) -> Vec<f32> {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next() + next() + next()).collect()
}

fn measured(x: &[f32], shape: [usize; 3], format: Format) -> (Measured, Vec<f32>) {
    let view = View::contiguous("x", x, shape.into()).unwrap();
    let granularity = format.own_block_size().map_or(Granularity::Token, Granularity::Block);
    let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
    let quantized = quantize(&view, scheme, None).unwrap();
    let quantized = quantized.view().unwrap();
    (measure(&view, &quantized).unwrap(), quantized.to_f32().unwrap())
}

#[test]
fn lengths_are_those_of_the_rows_and_never_too_short() {
    let (shape, x) = ([3, 17, 24], numbers(3 * 17 * 24));
    for format in Format::ALL {
        let (measured, near) = measured(&x, shape, format);
        assert_eq!((measured.shape(), measured.nbytes()), (shape, 4 * 3 * (2 * 17 + 2 * 24 + 2)));
        for at in 0..3 {
            let of = measured.matrix(at);
            let rows = |x: &[f32]| -> Vec<Vec<f64>> {
                x[at * 17 * 24..(at + 1) * 17 * 24]
                    .chunks(24)
                    .map(|row| row.iter().map(|&x| f64::from(x)).collect())
                    .collect()
            };
            let (x, near) = (rows(&x), rows(&near));
            let error: Vec<Vec<f64>> =
                x.iter().zip(&near).map(|(x, y)| x.iter().zip(y).map(|(x, y)| x - y).collect()).collect();
            let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let all: f64 = error.iter().map(|e| length(e).powi(2)).sum();
            let mut mean_error = vec![0.0; 24];
            for (row, e) in error.iter().enumerate() {
                let got = f64::from(of.error[row]);
                assert!(got >= length(e) && got <= length(e) * (1.0 + 3e-7) + 1e-30, "{format}: {got}");
                let away: Vec<f64> = x[row].iter().zip(of.mean).map(|(x, &c)| x - f64::from(c)).collect();
                let got = f64::from(of.spread[row]);
                assert!(got >= length(&away) && got <= length(&away) * (1.0 + 3e-7), "{format}: {got}");
                mean_error.iter_mut().zip(e).for_each(|(sum, e)| *sum += e / 17.0);
            }
            for c in 0..24 {
                let share = error.iter().map(|e| e[c] * e[c]).sum::<f64>() / all;
                assert!((f64::from(of.share[c]) - share).abs() < 1e-6, "{format}: column {c}");
                let mean = x.iter().map(|x| x[c]).sum::<f64>() / 17.0;
                assert!((f64::from(of.mean[c]) - mean).abs() < 1e-6);
            }
            assert!((f64::from(of.bias) - length(&mean_error)).abs() < 1e-6 * all.sqrt());
        }
        let again = Measured::from_numbers(measured.shape(), measured.numbers().to_vec()).unwrap();
        assert_eq!(again, measured);
        assert_eq!(Measured::from_numbers([3, 17, 23], measured.numbers().to_vec()), None);
    }
}

#[test]
fn errors_that_repeat_are_noticed() {
    let independent = numbers(512 * 64);
    let (measured_once, _) = measured(&independent, [1, 512, 64], Format::Int8);
    let once = measured_once.matrix(0).coherence;
    assert!((1.0..1.5).contains(&once), "{once}");
    for times in [4, 16, 64, 256] {
        let rows = 512 / times;
        let repeated: Vec<f32> = (0..512).flat_map(|j| independent[j % rows * 64..][..64].iter().copied()).collect();
        let (of, _) = measured(&repeated, [1, 512, 64], Format::Int8);
        let got = of.matrix(0).coherence;
        // A mean error is left out, which two tokens share half and half.
        let expected = times as f32 * if rows <= 2 { 0.9 } else { 1.0 };
        assert!(got > 0.75 * expected && got < 2.5 * expected, "{times}: {got}");
    }
}

/// One column whose codes are exact makes the scale, and every other number 0: the errors are the numbers.
#[test]
fn errors_that_are_a_multiple_of_the_numbers_are_noticed() {
    let (rows, columns) = (600, 16);
    let mut x: Vec<f32> = numbers(rows * columns).iter().map(|x| 0.3 * x).collect();
    x.chunks_mut(columns).enumerate().for_each(|(row, x)| x[0] = if row % 2 == 0 { 7.0 } else { -7.0 });
    let view = View::contiguous("x", &x, [rows, columns].into()).unwrap();
    let scheme = Scheme::new(Format::Int4, Some(Granularity::Tensor), ScaleLayout::Plain).unwrap();
    let quantized = quantize(&view, scheme, None).unwrap();
    let of = measure(&view, &quantized.view().unwrap()).unwrap();
    let of = of.matrix(0);
    assert!(of.share[0] == 0.0 && of.bias < 0.1, "{of:?}");
    let chance = 6.0 * (2.0 * of.share.iter().map(|share| share * share).sum::<f32>()).sqrt();
    let lean = rows as f32 - 1.0 - chance;
    assert!(of.coherence > 1.0 + 0.98 * lean / 12.0 && of.coherence < 1.5 + lean / 12.0, "{} and {lean}", of.coherence);
    // Fine codes of the same numbers do not lean on them.
    let scheme = Scheme::new(Format::Int8, Some(Granularity::Channel), ScaleLayout::Plain).unwrap();
    let quantized = quantize(&view, scheme, None).unwrap();
    let fine = measure(&view, &quantized.view().unwrap()).unwrap().matrix(0).coherence;
    assert!((1.0..1.5).contains(&fine), "{fine}");
}

#[test]
fn rows_that_are_not_finite_err_without_end_and_spoil_no_other() {
    let mut x = numbers(40 * 16);
    let (clean, _) = measured(&x[16..], [1, 39, 16], Format::E5m2);
    x[3] = f32::INFINITY;
    let (of, _) = measured(&x, [1, 40, 16], Format::E5m2);
    let (of, clean) = (of.matrix(0), clean.matrix(0));
    assert_eq!((of.error[0], of.spread[0]), (f32::INFINITY, f32::INFINITY));
    assert_eq!(of.error[1..], clean.error[..]);
    assert!(of.bias.is_finite() && of.coherence.is_finite() && of.mean.iter().chain(of.share).all(|x| x.is_finite()));
    assert!((of.coherence - clean.coherence).abs() < 0.05 * clean.coherence);
}

#[test]
fn what_is_no_pair_is_refused() {
    let x = numbers(64);
    let view = View::contiguous("x", &x, [4, 16].into()).unwrap();
    let scheme = Scheme::new(Format::Int8, None, ScaleLayout::Plain).unwrap();
    let quantized = quantize(&view, scheme, None).unwrap();
    let other = View::contiguous("x", &x, [16, 4].into()).unwrap();
    let refused = measure(&other, &quantized.view().unwrap());
    assert!(matches!(refused, Err(QuantError::Core(Error::ShapeMismatch { tensor: "x", .. }))), "{refused:?}");
    let row = View::contiguous("x", &x, [64].into()).unwrap();
    let quantized = quantize(&row, scheme, None).unwrap();
    let refused = measure(&row, &quantized.view().unwrap());
    assert!(matches!(refused, Err(QuantError::Core(Error::Rank { got: 1, .. }))), "{refused:?}");
}

#[test]
fn what_attention_reads_is_measured_by_the_shape_of_its_factors() {
    use Granularity::{Block, Channel, Head, Tensor, Token};
    let x = numbers(2 * 3 * 10 * 24);
    for shape in [[2, 3, 10, 24].into(), [6, 10, 24].into(), [60, 24].into()] {
        let x = View::contiguous("x", &x, shape).unwrap();
        for format in Format::ALL {
            let own = format.own_block_size().map(Block);
            for granularity in own.map_or_else(|| vec![Tensor, Head, Token, Channel, Block(8)], |own| vec![own]) {
                let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
                let quantized = quantize(&x, scheme, None).unwrap();
                let view = quantized.view().unwrap();
                let bare = Codes { granularity: None, head_dim: None, ..view.codes() };
                let again = QuantizedView::of_codes(view.tensor(), &bare, shape).unwrap();
                assert_eq!(again.to_f32(), view.to_f32(), "{format} {granularity} {shape}");
                assert_eq!(measure(&x, &again), measure(&x, &view));
            }
        }
    }
    let scheme = Scheme::new(Format::Int8, Some(Token), ScaleLayout::Plain).unwrap();
    let x = View::contiguous("x", &x, [60, 24].into()).unwrap();
    let quantized = quantize(&x, scheme, None).unwrap();
    let view = quantized.view().unwrap();
    let bare = Codes { granularity: None, ..view.codes() };
    let other = QuantizedView::of_codes(view.tensor(), &bare, [59, 24].into());
    assert!(matches!(other, Err(QuantError::Core(Error::DescaleShape { tensor: "scale", .. }))), "{other:?}");
    let stated = Codes { granularity: Some(Channel), ..bare };
    let other = QuantizedView::of_codes(view.tensor(), &stated, [60, 24].into());
    assert!(matches!(other, Err(QuantError::Core(Error::ShapeMismatch { tensor: "scale", .. }))), "{other:?}");
}
