#![no_main]
//! libFuzzer's binary of `rapt_fuzz::gradients`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rapt_fuzz_targets::count(rapt_fuzz::gradients(data)));
