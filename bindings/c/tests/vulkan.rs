//! An engine of rapt_engine_gpu(): tensors of the host with every option, attended to on the device as C calls it.
//!
//! Without an adapter nothing is tested, which is printed, and is a failure if `RAPT_REQUIRE` names `vulkan` (`cargo xtask vulkan`).

#[path = "abi/support.rs"]
#[allow(dead_code, reason = "the other tests use all of it")]
mod support;

use std::ffi::CStr;

use rapt_c::rapt_error::{RAPT_ERROR_UNSUPPORTED, RAPT_OK};
use rapt_c::{rapt_dtype, rapt_engine_gpu, rapt_explain, rapt_last_error_code, rapt_string_free};
use rapt_reference::{Inputs, Mask, Problem, naive};

use crate::support::{BEFORE, Call, DIM, HEADS, KV_LEN, Owned, Q_LEN, last_error};

fn engine() -> Option<Owned> {
    if engine::vulkan::adapters().is_empty() {
        let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "vulkan"), "RAPT_REQUIRE asks for vulkan: there is no adapter");
        println!("no Vulkan adapter: nothing is tested");
        return None;
    }
    let engine = rapt_engine_gpu(0);
    assert!(!engine.is_null(), "{}", last_error());
    Some(Owned(engine))
}

fn wide(data: &[f32]) -> Vec<f64> {
    data.iter().map(|x| f64::from(*x)).collect()
}

#[test]
fn a_call_is_attended_to_on_the_device() {
    let Some(engine) = engine() else { return };
    let mut text = std::ptr::null_mut();
    let mut call = Call::new(&engine, 5);
    // The second call finds what was checked for the first, and other numbers.
    for _ in 0..2 {
        call.data[support::Q].reverse();
        call.data[support::OUT].fill(BEFORE);
        assert_eq!(call.run(), RAPT_OK, "{}", last_error());
        let [q, k, v, _, sinks, slopes, _] = &call.data.each_ref().map(|data| wide(data));
        let mask: Vec<bool> = call.mask.iter().copied().cycle().take(HEADS * Q_LEN * KV_LEN).collect();
        let mut problem = Problem::plain(1, HEADS, Q_LEN, KV_LEN, DIM);
        problem.softmax_scale = call.options.softmax_scale;
        problem.window.left = Some(call.options.window_left as usize);
        let inputs = Inputs { q, k, v, mask: Some(Mask::Bool(&mask)), sinks: Some(sinks), alibi_slopes: Some(slopes) };
        let expected = naive(&problem, &inputs);
        for (got, expected) in call.outputs().into_iter().zip([&expected.out, &expected.lse]) {
            assert_eq!(got.len(), expected.len());
            for (got, expected) in wide(got).iter().zip(expected) {
                assert!(got == expected || (got - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{got} {expected}");
            }
        }
        let [q, k, v, out] = call.args;
        // SAFETY: what the call above was given, and a place for a pointer.
        let code = unsafe { rapt_explain(engine.0, q, k, v, out, call.options_arg, &raw mut text) };
        assert_eq!(code, RAPT_OK, "{}", last_error());
        // SAFETY: a string that was just written.
        let said = unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned();
        assert!(said.contains("on wgsl") && said.contains("copied to vulkan:0 and back"), "{said}");
        // SAFETY: given back once.
        unsafe { rapt_string_free(text) };
    }
}

#[test]
fn what_the_device_does_not_serve_is_refused_and_nothing_is_written() {
    let Some(engine) = engine() else { return };
    let mut call = Call::new(&engine, 7);
    // Numbers of 64 bits where there are half as many.
    for at in [support::Q, support::K, support::V, support::OUT] {
        call.tensors[at].dtype = rapt_dtype::RAPT_DTYPE_F64 as i32;
        call.shapes[at][1] = 1;
    }
    for at in [support::MASK, support::SINKS, support::SLOPES, support::LSE] {
        *call.descriptor(at) = std::ptr::null();
    }
    assert_eq!(call.run(), RAPT_ERROR_UNSUPPORTED, "{}", last_error());
    assert_eq!(rapt_last_error_code(), RAPT_ERROR_UNSUPPORTED);
    assert!(last_error().contains("WGSL has no 64-bit floats"), "{}", last_error());
    assert!(call.outputs()[0].iter().all(|x| *x == BEFORE));
}
