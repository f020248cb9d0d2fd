#![no_main]
//! libFuzzer's binary of `rapt_fuzz::pt2_expr`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rapt_fuzz_targets::count(rapt_fuzz::pt2_expr(data)));
