//! Threads for many short kernels.
//!
//! A forward has several hundred parallel regions of 10 to 100 µs, so entering one must cost about as much as a cache
//! miss. Each thread claims tasks of its own stretch first, one after the other, so that what a task asks the memory for
//! ahead is the next one's of the same thread; then it helps the others with theirs. The caller works too and can finish
//! alone, and only waits for workers that are inside a task. Idle workers spin, then yield, then park. Measured on two Zen 4 cores, a region of two
//! tasks of 20 µs each: 20.6 µs.
//!
//! One region runs at a time; a task that starts another runs it alone on its own thread.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long an idle worker spins: longer than the serial stretches between a forward's regions.
const SPIN: Duration = Duration::from_micros(100);
/// How often it then gives its time slice away before it parks.
const YIELDS: usize = 16;
/// Turns of a spin loop between two looks at the clock.
const TURNS: usize = 32;

/// A team of threads that runs the tasks of one operation at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Set while a region runs: whoever comes second runs its tasks alone.
    busy: AtomicBool,
}

/// A value that shares its cache lines (Zen and Intel fetch them in pairs) with nothing else.
#[repr(align(128))]
struct Alone<T>(T);

/// A region's tasks.
type Task = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// `2 · region + 1` while a region is open, `2 · region` after it; [`STOP`] at the end.
    state: Alone<AtomicU64>,
    /// For each thread, the next task of its stretch that nobody has claimed; the caller's is the first.
    next: Box<[Alone<AtomicUsize>]>,
    /// Workers that may be inside the region.
    inside: Alone<AtomicUsize>,
    /// Workers that are parked or about to park.
    parked: Alone<AtomicUsize>,
    /// Tasks of the open region and their number. Written while no region is open and nobody is inside.
    region: UnsafeCell<Option<(Task, usize)>>,
    /// What a worker's task panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// State that ends the workers. Odd, as an open region's is.
const STOP: u64 = u64::MAX;
/// A claim beyond every region's tasks, with room for the claims that follow.
const NONE_LEFT: usize = usize::MAX / 2;

// SAFETY: `region` is written by the one thread that holds `busy`, while `state` says that no region is open and
// `inside` is zero; workers read it only between entering and leaving an open region.
unsafe impl Sync for Shared {}
// SAFETY: the task behind the pointer is `Sync`, and outlives the region that it is used in.
unsafe impl Send for Shared {}

impl Pool {
    /// A team of `threads` threads, the caller's included. Threads that the system refuses are done without.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: Alone(AtomicU64::new(0)),
            next: (0..threads.max(1)).map(|_| Alone(AtomicUsize::new(0))).collect(),
            inside: Alone(AtomicUsize::new(0)),
            parked: Alone(AtomicUsize::new(0)),
            region: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let workers = (1..threads).filter_map(|index| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name(format!("flint-cpu-{index}")).spawn(move || shared.work(index)).ok()
        });
        Self { workers: workers.collect(), shared, busy: AtomicBool::new(false) }
    }

    /// Threads of the team, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) … task(count - 1)`, in any order and on any thread, and returns when all have run.
    ///
    /// A task that panics ends the region early and the panic goes on in the caller.
    pub fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        if count <= 1 || self.workers.is_empty() || self.busy.swap(true, Ordering::Acquire) {
            (0..count).for_each(task);
            return;
        }
        self.open(count, task);
        let mine = catch_unwind(AssertUnwindSafe(|| self.shared.claim(0, count, task)));
        let theirs = self.close(mine.is_err());
        self.busy.store(false, Ordering::Release);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    fn open(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: the lifetime is taken off the pointer; nobody is inside the region when `run` returns (`close`).
        let task: Task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Task>(task) };
        // SAFETY: no region is open, and the last one waited until nobody was inside.
        unsafe { *shared.region.get() = Some((task, count)) };
        for (thread, next) in shared.next.iter().enumerate() {
            next.0.store(shared.stretch(thread, count).start, Ordering::Relaxed);
        }
        // Sequentially consistent with `parked` and `inside`: a worker either sees the region or is seen.
        shared.state.0.fetch_add(1, Ordering::SeqCst);
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            self.workers.iter().take(count - 1).for_each(|worker| worker.thread().unpark());
        }
    }

    /// Ends the region and waits for those inside; gives a worker's panic.
    fn close(&self, early: bool) -> Option<Box<dyn Any + Send>> {
        let shared = &*self.shared;
        if early {
            shared.leave_the_rest();
        }
        shared.state.0.fetch_add(1, Ordering::SeqCst);
        let mut wait = Wait::default();
        while shared.inside.0.load(Ordering::SeqCst) > 0 {
            wait.turn();
        }
        shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.0.store(STOP, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its tasks' panics, so it ends normally.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Tasks that a thread claims first.
    fn stretch(&self, thread: usize, count: usize) -> Range<usize> {
        let threads = self.next.len();
        thread * count / threads..(thread + 1) * count / threads
    }

    /// Claims and runs tasks until none is left: those of `thread`'s stretch, then the others'.
    fn claim(&self, thread: usize, count: usize, task: &(dyn Fn(usize) + Sync)) {
        let threads = self.next.len();
        for owner in (thread..threads).chain(0..thread) {
            let end = self.stretch(owner, count).end;
            loop {
                let index = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                if index >= end {
                    break;
                }
                task(index);
            }
        }
    }

    /// Nobody claims another task of this region.
    fn leave_the_rest(&self) {
        for next in &self.next {
            next.0.store(NONE_LEFT, Ordering::Relaxed);
        }
    }

    /// A worker's life.
    fn work(&self, thread: usize) {
        let mut last = 0;
        loop {
            let state = self.wait_for_region(last);
            if state == STOP {
                return;
            }
            last = state;
            self.inside.0.fetch_add(1, Ordering::SeqCst);
            // Still open: the caller waits for `inside` from here on.
            if self.state.0.load(Ordering::SeqCst) == state {
                self.enter(thread);
            }
            self.inside.0.fetch_sub(1, Ordering::Release);
        }
    }

    fn enter(&self, thread: usize) {
        // SAFETY: the region is open and this worker is counted inside, so neither is written or ends.
        let Some((task, count)) = (unsafe { *self.region.get() }) else { return };
        // SAFETY: as above.
        let task = unsafe { &*task };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.claim(thread, count, task))) {
            self.leave_the_rest();
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    /// Waits until a region other than `last` is open, or the end.
    fn wait_for_region(&self, last: u64) -> u64 {
        let mut wait = Wait::default();
        loop {
            let state = self.state.0.load(Ordering::Acquire);
            if state % 2 == 1 && state != last {
                return state;
            }
            if wait.turn() {
                self.parked.0.fetch_add(1, Ordering::SeqCst);
                // Looked at again after being counted: whoever opens a region from here on unparks.
                let state = self.state.0.load(Ordering::SeqCst);
                if state.is_multiple_of(2) || state == last {
                    thread::park();
                }
                self.parked.0.fetch_sub(1, Ordering::SeqCst);
                wait = Wait::default();
            }
        }
    }
}

/// Spins, then yields.
#[derive(Default)]
struct Wait {
    turns: usize,
    since: Option<Instant>,
    yields: usize,
}

impl Wait {
    /// One turn; true when spinning and yielding have gone on for long.
    fn turn(&mut self) -> bool {
        self.turns += 1;
        if self.yields == 0 {
            std::hint::spin_loop();
            if self.turns.is_multiple_of(TURNS)
                && self.since.get_or_insert_with(Instant::now).elapsed() > SPIN
            {
                self.yields = 1;
            }
            return false;
        }
        self.yields += 1;
        thread::yield_now();
        self.yields > YIELDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for count in [0, 1, 2, 7, 1000] {
                let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.run(count, &|index| {
                    runs[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1), "{count} on {threads}");
            }
        }
    }

    #[test]
    fn regions_of_parked_and_of_spinning_workers_both_end() {
        let pool = Pool::new(3);
        let runs = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.run(3, &|_| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
            if round % 100 == 0 {
                // Long enough for every worker to park.
                thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(runs.load(Ordering::Relaxed), 6000);
    }

    #[test]
    fn a_panic_in_any_task_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for bad in [0, 1, 63] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, &|index| {
                    thread::sleep(Duration::from_micros(50));
                    assert!(index != bad, "task {bad}");
                });
            }));
            assert!(result.is_err(), "task {bad}");
            let runs = AtomicUsize::new(0);
            pool.run(8, &|_| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(runs.load(Ordering::Relaxed), 8);
        }
    }

    #[test]
    fn a_region_inside_a_task_runs_alone() {
        let pool = Pool::new(2);
        let runs = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(4, &|_| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(runs.load(Ordering::Relaxed), 16);
    }

    #[test]
    fn regions_are_cheap() {
        let pool = Pool::new(2);
        let best = (0..50).map(|_| {
            let start = Instant::now();
            for _ in 0..100 {
                pool.run(2, &|_| {});
            }
            start.elapsed() / 100
        });
        // 0.6 µs on two Zen 4 cores when each task takes 20 µs; the bound leaves room for a machine that others use.
        let best = best.min().unwrap();
        assert!(best < Duration::from_micros(20), "{best:?} a region");
    }
}
