//! The loops that `rapt bench` times compute what they say.

use rapt_cpu::available;
use rapt_cpu::ceiling::{FmaRounds, chain, sum};

#[test]
fn every_instruction_set_computes_the_same_rounds() {
    // Twelve vectors of 0.5·0.5 + 0.25 = 0.5, whatever the number of rounds.
    for &arch in available() {
        let fma = FmaRounds::of(arch);
        assert_eq!(fma.arch(), arch);
        assert_eq!(fma.run(1000, 0.5, 0.25), (fma.flops() / 2) as f32 * 0.5, "{arch:?}");
    }
}

#[test]
fn the_chain_and_the_sum_are_what_they_say() {
    // (3 ^ 3) · 3 = 0, and (0 ^ 3) · 3 = 9.
    assert_eq!(chain(2, 3), 9);
    assert_eq!(sum(&[u64::MAX, 2, 3]), 4);
}
