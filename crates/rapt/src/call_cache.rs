//! A bounded table of calls that were served before, for bindings: what a call says of itself → what serving it again takes.
//!
//! ```text
//! key   what the caller's arguments say: forms of tensors and options; addresses too, where a proof is kept
//! value its plan, and whatever a binding derived once
//! ```
//! Each key has a pair of places, which its hash chooses; a newer call takes the place of the older of two. So a look-up is one hash, one
//! uncontended lock and one comparison or two, nothing is ever swept, and no more is kept than there are places. It saves what comes
//! before the plan is looked up; the plans themselves are the [`Engine`](crate::Engine)'s. Deliberately absent: waiting for another
//! thread. A pair that is in use holds nothing for anybody else: that call takes the long way.

use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, TryLockError};

use rustc_hash::FxHasher;

/// What is kept of one call.
#[derive(Debug)]
struct Served<K, V> {
    key: K,
    value: V,
}

/// Two calls at most, the newer first: two that a program makes in turn do not drive each other out.
type Pair<K, V> = [Option<Box<Served<K, V>>>; 2];

/// Calls that were served before. Every method may be called from several threads at once.
#[derive(Debug)]
pub struct CallCache<K, V> {
    /// A power of two of them, at least two.
    pairs: Box<[Mutex<Pair<K, V>>]>,
}

impl<K: Hash + Eq, V> CallCache<K, V> {
    /// A cache of `places` calls, rounded up to a power of two.
    #[must_use]
    pub fn new(places: usize) -> Self {
        let pairs = places.clamp(4, 1 << 20).next_power_of_two() / 2;
        CallCache { pairs: (0..pairs).map(|_| Mutex::new([None, None])).collect() }
    }

    /// The places of `key`, unless another thread is using them.
    fn pair(&self, key: &K) -> Option<MutexGuard<'_, Pair<K, V>>> {
        let mut hasher = FxHasher::default();
        key.hash(&mut hasher);
        // The high bits of a product are its best mixed.
        let at = hasher.finish() >> (u64::BITS - self.pairs.len().ilog2());
        match self.pairs[at as usize].try_lock() {
            Ok(pair) => Some(pair),
            // What lies there is whole at every moment.
            Err(TryLockError::Poisoned(pair)) => Some(pair.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Gives what is kept for `key` to `serve`, which has it for itself meanwhile; `None` if nothing is kept, or if another
    /// thread is using it.
    pub fn with<R>(&self, key: &K, serve: impl FnOnce(&mut V) -> R) -> Option<R> {
        let mut pair = self.pair(key)?;
        let served = pair.iter_mut().flatten().find(|served| served.key == *key)?;
        Some(serve(&mut served.value))
    }

    /// A copy of what is kept for `key`.
    pub fn get(&self, key: &K) -> Option<V>
    where
        V: Clone,
    {
        self.with(key, |value| value.clone())
    }

    /// Keeps `value` for `key`, in place of what was kept for it or of the older call of its pair; not if another thread is using
    /// the pair.
    pub fn insert(&self, key: K, value: V) {
        if let Some(mut pair) = self.pair(&key) {
            if pair[0].as_ref().is_some_and(|newer| newer.key != key) {
                pair.swap(0, 1);
            }
            let served = Served { key, value };
            match &mut pair[0] {
                Some(former) => **former = served,
                none => *none = Some(Box::new(served)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_found_and_nothing_else() {
        let cache = CallCache::new(64);
        assert_eq!(cache.get(&"a"), None);
        cache.insert("a", 1);
        cache.insert("a", 2);
        assert_eq!((cache.get(&"a"), cache.get(&"b")), (Some(2), None));
        cache.with(&"a", |value| *value += 1);
        assert_eq!(cache.get(&"a"), Some(3));
    }

    /// A key that shares its places with every other.
    #[derive(Debug, PartialEq, Eq)]
    struct Same(u32);

    impl Hash for Same {
        fn hash<H: Hasher>(&self, hasher: &mut H) {
            hasher.write_u8(0);
        }
    }

    #[test]
    fn two_calls_share_a_pair_and_a_third_takes_the_place_of_the_older() {
        let cache = CallCache::new(64);
        let kept = |cache: &CallCache<Same, u32>| (1..=4).map(|n| cache.get(&Same(n))).collect::<Vec<_>>();
        cache.insert(Same(1), 10);
        cache.insert(Same(2), 20);
        assert_eq!(kept(&cache), [Some(10), Some(20), None, None]);
        cache.insert(Same(1), 11);
        assert_eq!(kept(&cache), [Some(11), Some(20), None, None]);
        cache.insert(Same(3), 30);
        assert_eq!(kept(&cache), [Some(11), None, Some(30), None]);
        cache.insert(Same(4), 40);
        assert_eq!(kept(&cache), [None, None, Some(30), Some(40)]);
    }

    #[test]
    fn no_more_is_kept_than_there_are_places_and_the_newest_of_each() {
        let cache = CallCache::new(5);
        (0..1000u64).for_each(|n| cache.insert(n, n));
        let kept: Vec<_> = (0..1000).filter_map(|n| cache.get(&n)).collect();
        assert!((4..=8).contains(&kept.len()), "{kept:?}");
        assert!(kept.iter().all(|n| *n > 900) && kept.contains(&999), "{kept:?}");
    }

    #[test]
    fn a_pair_in_use_holds_nothing_for_others_and_serves_on_after_a_panic() {
        let cache = CallCache::new(2);
        cache.insert(7, 1);
        cache.with(&7, |_| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    cache.insert(7, 2);
                    cache.get(&7)
                });
                assert_eq!(other.join().unwrap(), None);
            });
        });
        assert_eq!(cache.get(&7), Some(1));
        std::thread::scope(|scope| {
            assert!(scope.spawn(|| cache.with(&7, |_| panic!("while it is held"))).join().is_err());
        });
        assert_eq!(cache.get(&7), Some(1));
    }
}
