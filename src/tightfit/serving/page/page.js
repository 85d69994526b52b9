// Ctrl+Enter and Cmd+Enter send, from every field of a form.
document.addEventListener('keydown', event => {
  if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
  const button = findButton(event.target);
  if (button && !button.disabled) { event.preventDefault(); button.click(); }
}, true);

// The button `tf-go-X` of the form `tf-ask-X` that an element stands in.
function findButton(inside) {
  const form = inside.closest && inside.closest('[id^="tf-ask-"]');
  return form && document.getElementById(form.id.replace('ask', 'go'));
}

// Forms that answer by themselves, a moment after the last key.
const QUIET_MS = 150;
const waiting = new Map();
const ask = event => {
  const button = event.target.closest('.tf-form') && findButton(event.target);
  if (!button) return;
  clearTimeout(waiting.get(button));
  waiting.set(button, setTimeout(() => button.click(), QUIET_MS));
};
document.addEventListener('input', ask, true);
document.addEventListener('change', ask, true);

// Words that are offered for a field: gradio knows no datalist.
document.addEventListener('focusin', event => {
  const list = event.target.closest && event.target.closest('[class*="tf-offers-"]');
  const name = list && /tf-offers-([\w-]+)/.exec(list.className);
  if (name) event.target.setAttribute('list', name[1]);
});

// Buttons in answers: copy a command, or write a value into a field of the form.
document.addEventListener('click', event => {
  const copy = event.target.closest('.tf-copy'), fill = event.target.closest('.tf-fill');
  if (copy) {
    const range = document.createRange(), chosen = getSelection();
    range.selectNodeContents(copy.previousElementSibling);
    chosen.removeAllRanges();
    chosen.addRange(range);
    // The older call: the newer one is missing where the page has neither TLS nor a loopback name.
    copy.textContent = document.execCommand('copy') ? 'copied' : 'press Ctrl+C';
    setTimeout(() => { copy.textContent = 'copy'; }, 1500);
  }
  if (fill) {
    const field = document.querySelector(`#${fill.dataset.field} :is(input, textarea)`);
    field.value = fill.dataset.value;
    field.dispatchEvent(new Event('input', {bubbles: true}));
  }
});

// Runs go on while one looks at them.
const LOOK_AGAIN_MS = 3000;
setInterval(() => {
  const shown = document.getElementById('tf-runs');
  const button = document.getElementById('tf-go-runs');
  if (shown && shown.offsetParent && button && !document.hidden) button.click();
}, LOOK_AGAIN_MS);
