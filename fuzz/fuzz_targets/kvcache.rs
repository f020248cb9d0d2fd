#![no_main]
//! libFuzzer's binary of `rapt_fuzz::kvcache`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rapt_fuzz_targets::count(rapt_fuzz::kvcache(data)));
