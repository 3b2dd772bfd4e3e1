-- ARGV: since (us), rows at most, whether all are read, behind which worker; else behind how many of that time.
-- Returns {now_us, {row...}}: worker id, when it changed, ROW, load, info if it joined since; of a worker that is gone its
-- id and that time alone.
local since, most, names = tonumber(ARGV[1]), ARGV[2], nil
if ARGV[3] == '1' then
  names = redis.call('ZRANGEBYLEX', key('nodes'), ARGV[4] == '' and '-' or '(' .. ARGV[4], '+', 'LIMIT', 0, most)
else
  names = redis.call('ZRANGEBYSCORE', key('touched'), ARGV[1], '+inf', 'LIMIT', ARGV[4], most)
end
local rows = {}
for i, id in ipairs(names) do
  local node = key('node:', id)
  local row, stated = redis.call('HMGET', node, unpack(ROW)), redis.call('HMGET', node, 'load', 'joined', 'info')
  local changed = redis.call('ZSCORE', key('touched'), id)
  if not changed then
    touch(id)
    changed = NOW_US
  end
  if row[1] then
    rows[i] = {id, changed, joined(row), stated[1], tonumber(stated[2]) >= since and stated[3] or ''}
  else
    rows[i] = {id, changed}
  end
end
return {string.format('%.0f', NOW_US), rows}
