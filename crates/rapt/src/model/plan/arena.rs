//! One arena for all intermediate results: each has its place from the first step that uses it to the last.

use super::Step;
use super::place::Buffer;

/// Every part begins at a multiple of it: a cache line.
const ALIGN: usize = 64;

/// Gives each part of the arena its place, and answers the arena's length. `kept` are needed after the last step.
///
/// Parts are placed in the order of their first use, each in the smallest gap that holds it.
pub(super) fn assign(buffers: &mut [Buffer], steps: &[Step], kept: &[usize]) -> usize {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; buffers.len()];
    for (n, step) in steps.iter().enumerate() {
        for &buffer in &step.uses {
            let life = lives[buffer].get_or_insert((n, n));
            life.1 = n;
        }
    }
    for &buffer in kept {
        let life = lives[buffer].get_or_insert((0, steps.len()));
        life.1 = steps.len();
    }
    let mut order: Vec<usize> = (0..buffers.len()).filter(|&buffer| lives[buffer].is_some()).collect();
    order.sort_by_key(|&buffer| lives[buffer]);
    // What is live, by place.
    let mut live: Vec<(usize, usize, usize)> = Vec::new();
    let mut end = 0;
    for buffer in order {
        let (Some((first, last)), Buffer::Arena { at, len }) = (lives[buffer], &mut buffers[buffer]) else { continue };
        live.retain(|&(_, _, until)| until >= first);
        let len = len.next_multiple_of(ALIGN).max(ALIGN);
        let (mut best, mut from) = (None, 0);
        for &(start, used, _) in &live {
            let gap = start - from;
            if gap >= len && best.is_none_or(|(size, _)| gap < size) {
                best = Some((gap, from));
            }
            from = start + used;
        }
        *at = best.map_or(from, |(_, place)| place);
        end = end.max(*at + len);
        let place = live.partition_point(|&(start, ..)| start < *at);
        live.insert(place, (*at, len, last));
    }
    end
}
