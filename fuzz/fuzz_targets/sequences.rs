#![no_main]
//! libFuzzer's binary of `rapt_fuzz::sequences`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rapt_fuzz_targets::count(rapt_fuzz::sequences(data)));
