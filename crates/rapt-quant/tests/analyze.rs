//! The figures of a tensor, and that an error is the one of the codes.

use rapt_core::{Shape, View};
use rapt_quant::{Format, Granularity, QuantError, analyze};

#[test]
fn figures_are_what_they_are_called() {
    let data = [0.0f32, 5e-7, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0, -1.0];
    let x = View::contiguous("x", &data, [9].into()).unwrap();
    let figures = analyze(&x, &[], 32).unwrap();
    assert_eq!((figures.min, figures.max, figures.range()), (-1.0, 100.0, 101.0));
    assert_eq!((figures.quartiles, figures.outliers), ((f64::from(5e-7f32), 4.0), 1));
    assert_eq!((figures.sparsity, figures.outlier_share), (2.0 / 9.0, 1.0 / 9.0));
    let four = View::contiguous("x", &[5f64, 1.0, 3.0, 2.0], [4].into()).unwrap();
    assert_eq!(analyze(&four, &[], 32).unwrap().quartiles, (1.75, 3.5));
    let mean = data.iter().map(|&x| f64::from(x)).sum::<f64>() / 9.0;
    let variance = data.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / 9.0;
    assert!((figures.variance - variance).abs() < 1e-12 * variance);
    assert!((figures.mean_abs - 116.0 / 9.0).abs() < 1e-6);
}

#[test]
fn an_outlier_channel_asks_for_scales_by_channel() {
    let mut data: Vec<f32> = (0..64 * 32u16).map(|n| f32::from(n * 7 % 31) / 15.0 - 1.0).collect();
    data.iter_mut().skip(5).step_by(32).for_each(|x| *x *= 200.0);
    let x = View::contiguous("x", &data, Shape::from([64, 32])).unwrap();
    let analysis = analyze(&x, &Format::ALL, 8).unwrap();
    assert_eq!(analysis.candidates.len(), 5 * 5 + 3);
    assert_eq!(analysis.candidates.iter().filter(|it| it.is_recommended).count(), 8);
    let best = analysis.recommended(Format::Int8).unwrap();
    assert_eq!(best.granularity, Granularity::Channel);
    let of = |granularity| analysis.candidates.iter().find(|it| it.granularity == granularity).unwrap();
    // Of 32 channels with the error of the largest one, that one keeps it.
    assert!(best.mse < of(Granularity::Tensor).mse / 20.0);
    assert_eq!(of(Granularity::Tensor).nbytes, 64 * 32 + 4);
    // Equal errors: the fewest scales.
    let flat = View::contiguous("x", &[1f32; 64], [8, 8].into()).unwrap();
    let best = analyze(&flat, &[Format::Int8], 8).unwrap();
    assert_eq!(best.recommended(Format::Int8).unwrap().granularity, Granularity::Tensor);
}

#[test]
fn tensors_without_figures_are_refused() {
    let x = View::contiguous("x", &[1f32, f32::INFINITY], [2, 1].into()).unwrap();
    assert_eq!(analyze(&x, &[], 32), Err(QuantError::NotFinite { index: [1, 0].into(), what: "inf" }));
    let empty = View::contiguous("x", &[0f32; 0], [0, 4].into()).unwrap();
    assert!(analyze(&empty, &[], 32).is_err());
}
