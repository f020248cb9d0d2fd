//! A `rapt_kv_cache` as a sequence of steps: after each, every sequence has what it was given, and no page is lost.
//!
//! Data layout: a form of few pages, then steps, each a byte for its kind and a few for its sequence and numbers. Beside the cache stands a
//! list of rows for each sequence. Numbers are compared with rapt_attention() on those rows, codes with a new cache that is given the rows at
//! once, in one page. Deliberately absent: tensors that are wrong, which `kvcache` has.

use std::ptr::{null, null_mut};

use arbitrary::{Result as Parsed, Unstructured};
use c::{
    rapt_codes, rapt_error, rapt_kv_cache, rapt_kv_cache_append, rapt_kv_cache_append_batch, rapt_kv_cache_attention,
    rapt_kv_cache_create, rapt_kv_cache_destroy, rapt_kv_cache_fork, rapt_kv_cache_form, rapt_kv_cache_free,
    rapt_kv_cache_free_pages, rapt_kv_cache_length, rapt_kv_cache_new_sequence, rapt_kv_cache_num_sequences,
    rapt_kv_cache_truncate, rapt_options,
};
use rapt::{COMPUTED, DType, Format};

use crate::arbitrary::once_in;
use crate::c::engine;
use crate::ragged::{Alone, Dense, assert_same, check_answer, numbers, options};

const MOST_STEPS: usize = 24;

/// A cache that is given back when it is dropped.
struct Owned(*mut rapt_kv_cache);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { rapt_kv_cache_destroy(self.0) };
    }
}

impl Owned {
    fn new(form: &rapt_kv_cache_form) -> Option<Owned> {
        let mut cache = null_mut();
        // SAFETY: a struct and a pointer of this frame.
        let answer = unsafe { rapt_kv_cache_create(form, &raw mut cache) };
        check_answer(answer);
        assert_eq!(cache.is_null(), answer != rapt_error::RAPT_OK);
        (!cache.is_null()).then_some(Owned(cache))
    }

    fn add(&self) -> u64 {
        let mut id = 0;
        // SAFETY: alive, and a number of this frame.
        assert_eq!(unsafe { rapt_kv_cache_new_sequence(self.0, &raw mut id) }, rapt_error::RAPT_OK);
        id
    }

    fn free_pages(&self) -> usize {
        // SAFETY: alive.
        unsafe { rapt_kv_cache_free_pages(self.0) }
    }

    fn append(&self, ids: &[u64], tensors: &mut [Dense; 2], is_batch: bool) -> rapt_error {
        let [k, v] = tensors.each_mut().map(Dense::tensor);
        // SAFETY: alive, and tensors with memory of their own.
        let answer = unsafe {
            if is_batch {
                rapt_kv_cache_append_batch(self.0, ids.as_ptr(), ids.len(), &k, &v)
            } else {
                rapt_kv_cache_append(self.0, ids[0], &k, &v)
            }
        };
        check_answer(answer);
        answer
    }

    /// The bytes of `out` and `lse`.
    fn attend(&self, sizes: &Alone, ids: &[u64], q: &[u8], options: rapt_options) -> (rapt_error, [Vec<u8>; 2]) {
        let Alone { dtype, q_len, heads, dims, .. } = *sizes;
        let mut q = Dense::new(dtype, &[ids.len(), q_len, heads, dims[0]], q);
        let mut out = Dense::zeros(dtype, &[ids.len(), q_len, heads, dims[1]]);
        let mut lse = Dense::zeros(dtype.accumulation(), &[ids.len(), heads, q_len]);
        let of_lse = lse.tensor();
        let options = rapt_options { lse: &raw const of_lse, ..options };
        let (q, of_out) = (q.tensor(), out.tensor());
        // SAFETY: alive, and tensors with memory of their own.
        let answer =
            unsafe { rapt_kv_cache_attention(engine(), self.0, &q, ids.as_ptr(), ids.len(), &of_out, &options) };
        check_answer(answer);
        (answer, [out.bytes(), lse.bytes()])
    }
}

/// A sequence, and the bytes of its keys and values.
#[derive(Clone)]
struct Live {
    id: u64,
    rows: [Vec<u8>; 2],
}

struct Model {
    cache: Owned,
    form: rapt_kv_cache_form,
    sizes: Alone,
    all: Vec<Live>,
    /// Ids that no sequence has any more.
    gone: Vec<u64>,
    served: usize,
}

/// Whether the bytes describe a cache that served attention.
///
/// # Panics
/// If a step answers otherwise than the lists of rows do.
#[must_use]
pub fn sequences(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    run(&mut u).unwrap_or(false)
}

fn run(u: &mut Unstructured<'_>) -> Parsed<bool> {
    let dtype = COMPUTED[u.choose_index(COMPUTED.len())?];
    let kv_heads = u.int_in_range(1..=2usize)?;
    let (q_len, heads) = (u.int_in_range(1..=2)?, kv_heads * u.int_in_range(1..=2usize)?);
    let dims = [u.int_in_range(1..=18usize)?, u.int_in_range(1..=5usize)?];
    let format = if once_in(u, 3)? { Some(u.choose_index(Format::ALL.len())?) } else { None };
    let codes = rapt_codes {
        size: size_of::<rapt_codes>(),
        format: format.map_or(0, |at| 1 + at as i32),
        granularity: 0,
        block_size: 0,
        head_dim: 0,
        descale: null(),
        zero_point: null(),
        global_scale: if format.is_some_and(|at| Format::ALL[at].has_global_scale()) { &0.01 } else { null() },
        scale_layout: 0,
    };
    let codes = if format.is_some() { &raw const codes } else { null() };
    let form = rapt_kv_cache_form {
        size: size_of::<rapt_kv_cache_form>(),
        num_pages: u.int_in_range(0..=8)?,
        page_size: u.int_in_range(1..=4)?,
        num_kv_heads: kv_heads as i64,
        head_dim: dims[0] as i64,
        head_dim_v: dims[1] as i64,
        dtype: dtype.code().into(),
        k_codes: codes,
        v_codes: if u.arbitrary()? { codes } else { null() },
    };
    let Some(cache) = Owned::new(&form) else { return Ok(false) };
    let sizes = Alone { dtype, q_len, kv_len: 0, heads, kv_heads, dims };
    let mut model = Model { cache, form, sizes, all: Vec::new(), gone: vec![u64::MAX], served: 0 };
    for step in 0..MOST_STEPS {
        if u.is_empty() {
            break;
        }
        model.step(u, step as u64)?;
        model.check();
    }
    model.end();
    Ok(model.served > 0)
}

impl Model {
    /// A sequence that lives, or none.
    fn pick(&self, u: &mut Unstructured<'_>) -> Parsed<Option<usize>> {
        if self.all.is_empty() { Ok(None) } else { Ok(Some(u.choose_index(self.all.len())?)) }
    }

    fn length(&self, live: &Live) -> usize {
        live.rows[1].len() / (self.sizes.kv_heads * self.sizes.dims[1] * self.sizes.dtype.size_bytes())
    }

    fn step(&mut self, u: &mut Unstructured<'_>, seed: u64) -> Parsed<()> {
        let kind = u.int_in_range(0..=11u8)?;
        let Some(at) = self.pick(u)?.filter(|_| kind != 0) else {
            self.all.push(Live { id: self.cache.add(), rows: [Vec::new(), Vec::new()] });
            return Ok(());
        };
        let cache = self.cache.0;
        match kind {
            1 | 2 => {
                let (mut fork, free) = (0, self.cache.free_pages());
                // SAFETY: alive, and a number of this frame.
                let answer = unsafe { rapt_kv_cache_fork(cache, self.all[at].id, &raw mut fork) };
                assert_eq!((answer, self.cache.free_pages()), (rapt_error::RAPT_OK, free));
                self.all.push(Live { id: fork, ..self.all[at].clone() });
            }
            3 => {
                // SAFETY: alive.
                assert_eq!(unsafe { rapt_kv_cache_free(cache, self.all[at].id) }, rapt_error::RAPT_OK);
                self.gone.push(self.all.remove(at).id);
            }
            4 => {
                let (length, asked) = (self.length(&self.all[at]), u.int_in_range(0..=9usize)?);
                // SAFETY: alive.
                let answer = unsafe { rapt_kv_cache_truncate(cache, self.all[at].id, asked) };
                check_answer(answer);
                assert_eq!(answer == rapt_error::RAPT_OK, asked <= length);
                if asked <= length {
                    for rows in &mut self.all[at].rows {
                        rows.truncate(rows.len() / length.max(1) * asked);
                    }
                }
            }
            5 => {
                let (gone, mut fork) = (self.gone[u.choose_index(self.gone.len())?], 0);
                // SAFETY: alive, and a number of this frame.
                let answers =
                    unsafe { [rapt_kv_cache_free(cache, gone), rapt_kv_cache_fork(cache, gone, &raw mut fork)] };
                answers.into_iter().for_each(check_answer);
                assert_eq!(answers, [rapt_error::RAPT_ERROR_INDEX; 2]);
            }
            6 | 7 => self.attend(u, seed)?,
            8 => {
                let second = u.choose_index(self.all.len())?;
                self.append(&[at, second], u.int_in_range(0..=3)?, seed);
            }
            _ => self.append(&[at], u.int_in_range(0..=6)?, seed),
        }
        Ok(())
    }

    fn append(&mut self, to: &[usize], new: usize, seed: u64) {
        let Alone { dtype, kv_heads, dims, .. } = self.sizes;
        let batch: &[usize] = if to.len() == 1 { &[] } else { &[to.len()] };
        let rows = dims.map(|dim| numbers(to.len() * new * kv_heads * dim * dtype.size_bytes(), seed + dim as u64));
        let made = [0, 1].map(|n| Dense::new(dtype, &[batch, &[new, kv_heads, dims[n]]].concat(), &rows[n]));
        let mut tensors = made;
        let ids: Vec<u64> = to.iter().map(|at| self.all[*at].id).collect();
        let (free, page_size) = (self.cache.free_pages(), self.form.page_size as usize);
        let answer = self.cache.append(&ids, &mut tensors, to.len() > 1);
        // A page that is shared takes one more; how many are, the cache alone knows.
        let more = |at: &usize| {
            let length = self.length(&self.all[*at]);
            (length + new).div_ceil(page_size) - length.div_ceil(page_size)
        };
        let least: usize = to.iter().map(more).sum();
        let is_twice = to.len() == 2 && to[0] == to[1];
        match answer {
            rapt_error::RAPT_OK => {
                assert!(!is_twice && least <= free, "pages were found that are not there");
                for (n, &at) in to.iter().enumerate() {
                    for (rows, all) in rows.iter().zip(&mut self.all[at].rows) {
                        let len = rows.len() / to.len();
                        all.extend_from_slice(&rows[n * len..(n + 1) * len]);
                    }
                }
            }
            answer => {
                assert_eq!(self.cache.free_pages(), free, "a refused append took pages");
                match answer {
                    rapt_error::RAPT_ERROR_OPTION => assert!(is_twice, "each sequence was given once"),
                    rapt_error::RAPT_ERROR_OUT_OF_MEMORY => assert!(least + to.len() > free, "there were pages"),
                    rapt_error::RAPT_ERROR_NUMBER => assert!(!self.form.k_codes.is_null(), "there are no codes"),
                    answer => panic!("{answer:?} for keys that fit"),
                }
            }
        }
    }

    fn attend(&mut self, u: &mut Unstructured<'_>, seed: u64) -> Parsed<()> {
        let count = u.int_in_range(0..=3usize)?;
        let asked = (0..count).map(|_| u.choose_index(self.all.len())).collect::<Parsed<Vec<usize>>>()?;
        let options = options(u)?;
        let Alone { dtype, q_len, heads, dims, .. } = self.sizes;
        let of_q = q_len * heads * dims[0] * dtype.size_bytes();
        let q = numbers(count * of_q, seed + 40);
        let ids: Vec<u64> = asked.iter().map(|at| self.all[*at].id).collect();
        let (answer, [out, lse]) = self.cache.attend(&self.sizes, &ids, &q, options);
        if answer == rapt_error::RAPT_ERROR_UNSUPPORTED {
            // Codes become float32.
            assert!(dtype == DType::F64 && !self.form.k_codes.is_null(), "sequences that live are served");
            return Ok(());
        }
        assert_eq!(answer, rapt_error::RAPT_OK, "sequences that live are served");
        let row = |bytes: &[u8], n: usize| {
            let len = bytes.len() / count.max(1);
            bytes[n * len..(n + 1) * len].to_vec()
        };
        for (n, &at) in asked.iter().enumerate() {
            let [one, one_lse] = self.alone(&self.all[at], &row(&q, n), options);
            assert_same(dtype, &row(&out, n), &one, "out");
            assert_same(dtype.accumulation(), &row(&lse, n), &one_lse, "lse");
        }
        self.served += usize::from(count > 0);
        Ok(())
    }

    fn alone(&self, live: &Live, q: &[u8], options: rapt_options) -> [Vec<u8>; 2] {
        let (kv_len, Alone { dtype, kv_heads, dims, .. }) = (self.length(live), self.sizes);
        if self.form.k_codes.is_null() {
            return Alone { kv_len, ..self.sizes }.run([q, &live.rows[0], &live.rows[1]], None, options);
        }
        let form = rapt_kv_cache_form { num_pages: 1, page_size: kv_len.max(1) as i64, ..self.form };
        let cache = Owned::new(&form).expect("a form that was served before, but for its pages");
        let id = cache.add();
        let mut tensors = [0, 1].map(|n| Dense::new(dtype, &[kv_len, kv_heads, dims[n]], &live.rows[n]));
        assert_eq!(cache.append(&[id], &mut tensors, false), rapt_error::RAPT_OK);
        let (answer, results) = cache.attend(&self.sizes, &[id], q, options);
        assert_eq!(answer, rapt_error::RAPT_OK);
        results
    }

    /// Lengths and counts are those of the lists.
    fn check(&self) {
        for live in &self.all {
            let mut length = 0;
            // SAFETY: alive, and a number of this frame.
            let answer = unsafe { rapt_kv_cache_length(self.cache.0, live.id, &raw mut length) };
            assert_eq!((answer, length), (rapt_error::RAPT_OK, self.length(live)));
        }
        // SAFETY: alive.
        assert_eq!(unsafe { rapt_kv_cache_num_sequences(self.cache.0) }, self.all.len());
    }

    /// Without sequences every page is free.
    fn end(&self) {
        for live in &self.all {
            // SAFETY: alive.
            assert_eq!(unsafe { rapt_kv_cache_free(self.cache.0, live.id) }, rapt_error::RAPT_OK);
        }
        assert_eq!(self.cache.free_pages(), self.form.num_pages as usize);
    }
}
