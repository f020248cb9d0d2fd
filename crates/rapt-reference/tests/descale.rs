//! The five shapes of a descale, each against its formula, and against what rapt-quant makes of the same tensor.

use rapt_core::{Shape, View};
use rapt_quant::{Format, Granularity, ScaleLayout, Scheme, quantize};
use rapt_reference::{Descale, Inputs, Problem, naive};

const SHAPE: [usize; 4] = [2, 3, 4, 6];

#[test]
fn numbers_are_those_that_rapt_quant_gives() {
    let x: Vec<f32> = (0..144u32).map(|n| (n * 37 % 101) as f32 - 40.0).collect();
    let view = View::contiguous("x", &x, SHAPE.into()).unwrap();
    for granularity in
        [Granularity::Tensor, Granularity::Head, Granularity::Token, Granularity::Channel, Granularity::Block(3)]
    {
        for format in [Format::Int8, Format::Uint8, Format::E4m3fn] {
            let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
            let quantized = quantize(&view, scheme, None).unwrap();
            let codes: Vec<f64> = quantized.codes().iter().map(|&code| f64::from(format.decode(code))).collect();
            let factor: Vec<f64> = quantized.scale_f32().unwrap().iter().map(|&scale| f64::from(scale)).collect();
            let zero_point: Option<Vec<f64>> =
                quantized.zero_point().map(|zero_point| zero_point.iter().map(|&zero| f64::from(zero)).collect());
            let shape: &Shape = quantized.form().scale_shape();
            let descale = Descale { factor: &factor, zero_point: zero_point.as_deref(), shape };
            let numbers: Vec<f32> = descale.numbers(&codes, SHAPE).iter().map(|&x| x as f32).collect();
            assert_eq!(numbers, quantized.view().unwrap().to_f32().unwrap(), "{format} by {granularity}");
        }
    }
}

#[test]
fn a_single_key_of_a_quantized_cache_is_its_value() {
    let numbers = Descale { factor: &[0.5, 2.0], zero_point: Some(&[1.0, 3.0]), shape: &[1, 1, 1, 2] };
    let v = numbers.numbers(&[5.0, 7.0], [1, 1, 1, 2]);
    assert_eq!(v, [2.0, 8.0]);
    let out = naive(&Problem::plain(1, 1, 1, 1, 2), &Inputs::plain(&[1.0, 1.0], &v, &v)).out;
    assert_eq!(out, [2.0, 8.0]);
}

#[test]
#[should_panic(expected = "a descale of shape [2, 3, 5]")]
fn a_descale_of_another_shape_is_no_granularity() {
    let _ = Descale { factor: &[1.0; 30], zero_point: None, shape: &[2, 3, 5] }.numbers(&[0.0; 144], SHAPE);
}
